"""The search. Every setting of a space is pruned by its memory bill and its lower bound, or estimated. The best are
planned.

[Note: The search]
1. Settings whose least bytes exceed the device are dropped. For all others the lower bound of their iteration time is
   computed.
2. For each part of the device in :data:`PARTS`, from the whole device downwards, quick plans estimate the settings
   within this many bytes. The order is that of expected times: the time of a setting with more bytes; without one, its
   bound, multiplied by the ratio of time to bound of the last estimated setting that is cut in the same way. Settings
   that cannot be faster than the best are skipped.
3. The fastest settings on the whole device are estimated by more quick plans, because a quick plan leaves out some
   decisions of a complete plan. Then the fastest are planned completely, one after another, as long as the estimate of
   the next setting (in small cases its bound) is below the best plan. A single setting is always planned completely.
4. The frontier consists of the choices that no choice with as few bytes beats in time.
5. A plan has to be faster than stock Megatron. Before 3, stock Megatron is simulated with the settings that it has, in
   the order of their bounds, until no further setting can be faster. The fastest takes part in 3.
Effort is counted and no clock is read, so that the same input gives the same answer everywhere.
"""

from collections.abc import Callable
from math import inf
from typing import NamedTuple

from msgspec.structs import replace

from megatron_ext.cost.cost_table import CostTable
from megatron_ext.formats.errors import InputError
from megatron_ext.planner.effort import is_small, number_of_steps
from megatron_ext.planner.fit.costs import SettingCosts
from megatron_ext.planner.fit.estimate_setting import (
    Choice,
    Stock,
    bound_us,
    choice_of,
    floor_bytes,
    least_bytes,
    quick_choice,
    stock_of,
)
from megatron_ext.planner.fit.setting import Setting
from megatron_ext.planner.fit.space import Space
from megatron_ext.planner.last_lines import short_of
from megatron_ext.planner.policies import plan
from megatron_ext.planner.quick_plan import FewRounds, TimedPlan, Times
from megatron_ext.planner.without_plan import stock_bytes
from megatron_ext.simulator.timing import Timing
from megatron_ext.workload.workload import Limits, Workload

PARTS = (1.0, 0.8, 0.64, 0.5, 0.4, 0.32, 0.25, 0.2, 0.16)
"""Parts of the device's bytes for which settings are estimated."""

NEAR = 0.04
"""On the whole device, settings whose bound is this close to the best are estimated as well, because they may be equal.
Settings whose quick plan is this close are planned, which makes them faster."""

EFFORT, ON_WHOLE, ON_STOCK = 40.0, 0.5, 0.1
"""The effort for quick plans, which is about the seconds that they take; the share of it for the whole device; and the
effort for a simulation of stock Megatron as a share of that for a quick plan."""

OF_LAYER, OF_STEP = {1: 0.003, 2: 0.003, 3: 0.005}, {1: 7e-5, 2: 7e-5, 3: 4e-4}
"""The effort of a quick plan by zero stage: for a layer, and for a layer in a step of a rank."""

ON_CLOSER, CLOSER, MUCH = 0.375, 10, 0.2
"""For the whole device: the share of that effort for better estimates; how many times as long as a quick plan such an
estimate takes; and how close to the best a quick plan must be to get one. Complete plans were up to 0.2 faster than
quick ones."""

PLAN_EFFORT, PLAN_OF_LAYER = 45.0, {1: 0.1, 2: 0.2, 3: 1.3}
"""The effort for complete plans, and for one layer in such a plan by zero stage: about the seconds that it takes."""

SMALL_LAYERS, SMALL_STEPS, SMALL_PLANS = 8, 64, 16
"""Up to this many layers and steps of all ranks, up to this many settings are planned while their bound is below the
best plan, whatever the effort."""

FEW_PLANS = 3
"""The number of complete plans in all other cases."""

ON_HOST_MEMORY, HALVINGS = 0.3, 4
"""If no plan has enough host memory: the share of the effort for quick plans that is spent on plans without that limit,
and the number of bisections that search for the least host memory of the best of these settings."""

LEAST_STEP = 0.05
"""The share of its bytes by which a choice of the frontier must be smaller than the choice before."""

Room = Callable[[Setting, Workload], int]
"""Device bytes that a plan of a setting may hold by its bill."""


class FittingSetting(NamedTuple):
    """A setting that fits. ``room_bytes``: device bytes that its plans may hold. ``effort``: that of a quick plan."""

    setting: Setting
    workload: Workload
    table: CostTable
    room_bytes: int
    least_bytes: int
    bound_us: float
    effort: float

    def choice(self, *, closely: bool = False, **limits: int | None) -> Choice | InputError:
        """The quick plan of this setting within ``limits``, or the error that says why there is none."""
        work = replace(self.workload, limits=replace(self.workload.limits, **limits))
        try:
            return quick_choice(self.setting, work, self.table, self.bound_us, closely=closely)
        except InputError as error:
            return error


class Fit(NamedTuple):
    """The result of a search.

    Attributes:
        frontier: the fastest choice first, each choice with fewer bytes than the one before. The first is the winner.
        tried: all choices on the whole device by their time. Planned choices have the time of their plan.
        given: the user's own setting; None if it does not fit, and ``refused`` says why.
        settings, pruned, left_out: the number of settings, of settings that do not fit, and of settings that were not
            estimated for lack of effort although they might be faster by their bound.
        bound_us: no setting that fits can be faster than this.
        stock: settings with which stock Megatron fits. The fastest of them is included, except if ``stock_left_out``:
            then the effort did not suffice.
    """

    frontier: list[Choice]
    tried: list[Choice]
    given: Choice | None
    refused: str
    settings: int
    pruned: int
    left_out: int
    bound_us: float
    stock: list[tuple[Setting, Stock]]
    stock_left_out: bool

    @property
    def winner(self) -> Choice:
        return self.frontier[0]


class NothingFits(InputError):
    """No setting fits. ``least``: the setting that exceeds its room by the fewest bytes. The error also has the device
    bytes that this setting needs, and how many are missing."""

    def __init__(self, least: Setting, need_bytes: int, short_bytes: int):
        self.least, self.need_bytes, self.short_bytes = least, need_bytes, short_bytes
        super().__init__(
            f"nothing fits: {least.text()} needs the least, {need_bytes} bytes of a device, {short_bytes} bytes short",
            field="--limit-device-bytes",
            value=need_bytes - short_bytes,
        )


class SettingSearch:
    """Finds the fastest settings of ``space`` for every amount of device bytes.

    Args:
        most_bytes: device bytes that no setting's room exceeds.
    """

    def __init__(self, space: Space, costs: SettingCosts, limits: Limits, room: Room, most_bytes: int):
        self.space, self.costs, self.limits, self.room, self.most_bytes = space, costs, limits, room, most_bytes
        self.effort = EFFORT * ON_WHOLE
        self.choices: dict[Setting, list[Choice]] = {}
        self.refused: dict[Setting, InputError] = {}
        self.left_out: set[Setting] = set()
        self.slower: dict[str | None, float] = {}  # than its bound was the last setting that is cut in this way

    def run(self) -> Fit:
        """Run the search. Raises NothingFits if no setting fits the device, and InputError if the space is empty or no
        setting keeps the other limits."""
        settings = [one for one in self.space.settings() if self.costs.allows(one)]
        if not settings:
            raise InputError("none was measured with a setting that may be chosen", field="--cost-table")
        candidates = self._that_fit(settings)
        for own in (one for one in candidates if one.setting == self.space.given):
            self._estimate(own, 1.0)
        for part in PARTS:
            self._at(part, candidates)
            self.effort += EFFORT * (1 - ON_WHOLE) / (len(PARTS) - 1)
        stock = self._stock(candidates)
        self._look_closer(candidates)
        planned = {choice.setting: choice for choice in self._planned(candidates)}
        whole = [*planned.values(), *(choice for choices in self.choices.values() for choice in choices)]
        if not whole:
            raise self._short_of_host(candidates)
        best = (planned.get(one.setting) or self._known(one, 1.0) for one in candidates)
        tried = sorted(filter(None, best), key=lambda choice: (choice.us, choice.device_bytes))
        given = next((choice for choice in tried if choice.setting == self.space.given), None)
        left_out = self.left_out - {*self.choices} - {*self.refused}
        return Fit(
            _frontier(whole, tried[0]),
            tried,
            given,
            str(self.refused.get(self.space.given, "")),
            len(settings),
            len(settings) - len(candidates),
            sum(one.setting in left_out and one.bound_us < tried[0].us for one in candidates),
            min(one.bound_us for one in candidates),
            *stock,
        )

    def _that_fit(self, settings: list[Setting]) -> list[FittingSetting]:
        found: list[FittingSetting] = []
        least: tuple[float, Setting | None, int] = (inf, None, 0)
        bases: dict[tuple, Workload] = {}
        for setting in settings:
            floor = floor_bytes(setting)
            if floor > self.most_bytes and setting != self.space.given and least[0] <= floor - self.most_bytes:
                continue
            key = setting.shape, setting.parallel, setting.batch
            if key not in bases:  # settings of one layout and batch follow each other
                bases = {key: self.costs.with_activations(setting, setting.workload(self.limits))}
            work = replace(bases[key], zero_stage=setting.zero_stage, optimizer=setting.optimizer)
            few = FewRounds(work).parts[-1][0]  # holds the same bytes: what is in flight repeats with every round
            room_bytes = self.room(setting, few)
            need = least_bytes(few)
            if need > room_bytes:
                least = min(least, (need - room_bytes, setting, need), key=lambda item: item[0])
                if setting == self.space.given:
                    why = f"holds at least {need} bytes on a device, {need - room_bytes} bytes short"
                    self.refused[setting] = InputError(why)
                continue
            work = replace(work, limits=replace(self.limits, device_bytes=room_bytes))
            table = self.costs.of(setting, work)
            bound, effort = bound_us(work, Timing(work, table)), _quick_effort(work)
            found.append(FittingSetting(setting, work, table, room_bytes, need, bound, effort))
        if not found:
            short, setting, need = least
            assert setting is not None
            raise NothingFits(setting, need, int(short))
        return found

    def _short_of_host(self, candidates: list[FittingSetting]) -> InputError:
        """Why none of ``candidates`` is planned although they fit the device: the host memory that one of them
        takes."""
        limit, effort = self.limits.host_bytes, EFFORT * ON_HOST_MEMORY
        tried = [one for one in candidates if one.setting in self.refused]
        least: tuple[int, FittingSetting] | None = None
        for one in () if limit is None else sorted(tried, key=lambda each: each.effort):
            choice = one.choice(host_bytes=None)
            if isinstance(choice, Choice) and (least is None or choice.host_bytes < least[0]):
                least = choice.host_bytes, one
            effort -= one.effort
            if effort < 0:
                break
        if limit is None or least is None:
            return next(iter([self.refused[one.setting] for one in tried] or self.refused.values()))
        enough, one = least
        below = limit
        for _ in range(HALVINGS):
            between = int((below * enough) ** 0.5)
            choice = one.choice(host_bytes=between)
            below, enough = (below, choice.host_bytes) if isinstance(choice, Choice) else (between, enough)
        why = f"nothing fits: {one.setting.text()} takes {enough} bytes of a node's host memory"
        return InputError(why, field="--limit-host-bytes", value=limit)

    def _known(self, one: FittingSetting, part: float) -> Choice | None:
        """The fastest known choice of a setting within this part of the device."""
        fits = [each for each in self.choices.get(one.setting, ()) if each.device_bytes <= part * one.room_bytes]
        return min(fits, key=lambda each: each.us, default=None)

    def _at(self, part: float, candidates: list[FittingSetting]) -> None:
        """Estimate the settings that may be the fastest within this part of the device, see [Note: The search]."""
        best, near = inf, 1 + (NEAR if part == 1 else 0)
        left: list[tuple[float, str | None, FittingSetting]] = []  # with the least time, and a cut if that is a bound
        for one in candidates:
            if one.least_bytes > part * one.room_bytes or one.setting in self.refused:
                continue
            known, larger = self._known(one, part), self._known(one, 1.0)
            if known is not None:
                best = min(best, known.us)
            elif larger is not None:
                left.append((larger.us, None, one))
            else:
                left.append((one.bound_us, _cut(one), one))
        expected_us = lambda each: each[0] * self.slower.get(each[1], 1.0)
        # ends: every turn takes a setting out
        while left := [each for each in left if each[0] <= best * near and self._affords(each[2])]:
            chosen = min(left, key=expected_us)
            left.remove(chosen)
            choice = self._estimate(chosen[2], part)
            if choice is not None:
                best = min(best, choice.us)

    def _affords(self, one: FittingSetting) -> bool:
        if one.effort > self.effort:
            self.left_out.add(one.setting)
        return one.effort <= self.effort

    def _estimate(self, one: FittingSetting, part: float) -> Choice | None:
        if not self._affords(one):
            return None
        self.effort -= one.effort
        choice = one.choice(device_bytes=int(part * one.room_bytes))
        if isinstance(choice, InputError):
            if part == 1:
                self.refused[one.setting] = choice
            return None
        self.choices.setdefault(one.setting, []).append(choice)
        self.slower[_cut(one)] = choice.us / one.bound_us
        return choice

    def _look_closer(self, candidates: list[FittingSetting]) -> None:
        """Make better estimates, on the whole device, for settings that may be the fastest."""
        effort, best = EFFORT * ON_CLOSER, inf
        for choice, one in self._by_quick_plan(candidates):
            if choice is None or choice.us > best * (1 + MUCH):
                return
            best = min(best, choice.us)
            if one.setting.zero_stage == 1 or not is_small(one.workload) or one.bound_us >= best:
                continue
            effort -= CLOSER * one.effort
            closer = one.choice(closely=True) if effort >= 0 else None
            if isinstance(closer, Choice):
                self.choices[one.setting].append(closer)
                best = min(best, closer.us)

    def _stock(self, candidates: list[FittingSetting]) -> tuple[list[tuple[Setting, Stock]], bool]:
        found, best, self.effort, fastest = [], inf, EFFORT, None
        its = (one for one in candidates if one.setting.zero_stage == 1 and not one.setting.optimizer.delayed)
        for one in sorted(its, key=lambda each: each.bound_us):
            if one.bound_us >= best or self.effort <= 0:
                break
            rounds = FewRounds(one.workload)
            held = stock_bytes(rounds.parts[-1][0])
            if not any(map(short_of, held, (one.room_bytes, self.limits.host_bytes))):
                self.effort -= ON_STOCK * one.effort
                stock = stock_of(rounds, rounds.timings(one.table), held)
                found.append((one.setting, stock))
                best, fastest = min((best, fastest), (stock.us, one), key=lambda each: each[0])
        left_out, self.effort = self.effort <= 0, inf
        if fastest is not None and (fastest.setting not in self.choices or fastest.setting in self.left_out):
            self._estimate(fastest, 1.0)  # the search has left it out, but a plan of it may be the fastest
        return found, left_out

    def _by_quick_plan(self, candidates: list[FittingSetting]) -> list[tuple[Choice | None, FittingSetting]]:
        """The fastest quick plan first. Settings without a quick plan are ordered by their bound."""
        known = ((self._known(one, 1.0), one) for one in candidates)
        return sorted(known, key=lambda it: (it[0].us, it[0].device_bytes) if it[0] else (inf, it[1].bound_us))

    def _planned(self, candidates: list[FittingSetting]) -> list[Choice]:
        """The best settings of the whole device, planned in full. A single setting always is, as ``plan`` would."""
        found: list[Choice] = []
        effort = PLAN_EFFORT
        small, alone = all(map(_is_small, candidates)), len(candidates) == 1
        for choice, one in self._by_quick_plan(candidates):
            cost = PLAN_OF_LAYER[one.setting.zero_stage] * sum(chunk.num_layers for chunk in one.workload.chunks)
            needed = alone or (choice is None and effort == PLAN_EFFORT)  # the first, if there is no quick plan
            if len(found) == (SMALL_PLANS if small else FEW_PLANS) or (cost > effort and not small and not needed):
                break
            hoped = inf if choice is None else choice.us / (1 + NEAR)
            if small:
                hoped = one.bound_us
            if found and hoped >= min(each.us for each in found):
                continue
            effort -= cost
            choice = _whole_plan(one, compare=small or alone) or choice
            if choice is not None:
                found.append(choice)
        return found


def _quick_effort(work: Workload) -> float:
    of_rank = sum(chunk.num_layers for chunk in work.chunks_of_rank(0)) / work.parallel.vp
    layers = sum(chunk.num_layers for chunk in work.chunks)
    return OF_LAYER[work.zero_stage] * layers + OF_STEP[work.zero_stage] * FewRounds(work).steps * of_rank


def _cut(one: FittingSetting) -> str:
    """How a setting is cut and where its optimizer steps. Small micro-batches expose transfers that large ones hide."""
    parallel, optimizer = one.workload.parallel, one.setting.optimizer
    sizes = parallel.pp, parallel.tensor_model_parallel_size, one.setting.zero_stage, one.setting.batch.micro_batch_size
    return f"{sizes} {optimizer.on_host} {optimizer.delayed}"


def _is_small(one: FittingSetting) -> bool:
    layers = sum(chunk.num_layers for chunk in one.workload.chunks)
    return layers <= SMALL_LAYERS and number_of_steps(one.workload) <= SMALL_STEPS


def _whole_plan(one: FittingSetting, *, compare: bool) -> Choice | None:
    """The setting planned by the complete planner; None if it finds nothing."""
    try:
        schedule = plan(one.workload, one.table, compare=compare)
        predicted = schedule.predicted
        assert predicted is not None
        rounds = FewRounds(one.workload, every=True)
        times = Times(predicted.iteration_time_us, predicted.busy_us, max(predicted.exposed_us, default=0.0))
        bound = max(one.bound_us, predicted.lower_bound_us or 0.0)
        return choice_of(one.setting, rounds, one.table, TimedPlan((schedule,), times), bound)._replace(planned=True)
    except InputError:
        return None


def _frontier(choices: list[Choice], winner: Choice) -> list[Choice]:
    found, most = [winner], winner.device_bytes
    for choice in sorted(choices, key=lambda each: (each.us, each.device_bytes)):
        if choice.device_bytes <= most * (1 - LEAST_STEP) and choice.us >= winner.us:
            found.append(choice)
            most = choice.device_bytes
    return found
