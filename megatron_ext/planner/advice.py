"""Whether a plan will help on a machine that nobody has measured, from model sizes and a data sheet alone.

[Note: The interval]
Every figure of the sheet is drawn from its range, all at once (Latin hypercube sampling, McKay, Beckman and Conover
1979); half of the draws lie below the sheet's value. Both plans are simulated on each machine drawn. The interval goes
from the least to the most gain of all draws, and is widened by the simulator's own error as the verdict of ``plan`` is.
"""

import random
from collections.abc import Iterator
from math import hypot, inf
from typing import Literal, NamedTuple

import msgspec

from megatron_ext.bounds.memory_headroom import with_headroom
from megatron_ext.cost.estimated_table import estimate
from megatron_ext.cost.hardware_sheet import Figure, HardwareSheet, drawn, figures
from megatron_ext.formats.errors import InputError
from megatron_ext.formats.rank_memory import RankMemory
from megatron_ext.planner.gain_interval import MODEL_ERROR, WIDTH
from megatron_ext.planner.quick_plan import FewRounds, Plan, by_all_gathers, quick_plans, synchronous_plan
from megatron_ext.planner.stock import OVERLAPPED, SYNCHRONOUS
from megatron_ext.planner.verdict import answer_of
from megatron_ext.schedule.memory_bill import memory_bill
from megatron_ext.workload.gpt_shapes import GptShape, MicroBatch, gpt_workload
from megatron_ext.workload.optimizer_settings import OptimizerSettings
from megatron_ext.workload.parallel import Parallel, megatron_order
from megatron_ext.workload.workload import Limits, Workload

DEVICE_PART, HOST_PART = 0.92, 0.8
"""Part of the memory that a run may fill; the rest is for libraries, kernels and the system."""
EFFORT = 250_000
"""Steps and gathers that may be simulated for one advice: the larger the workload, the fewer draws and settings."""
FEWEST_DRAWS, MOST_DRAWS, FEWEST_NEIGHBOURS = 6, 16, 2
PLANS, FEWEST_PLANS = 6, 3
"""Plans that are made and simulated for a setting, and for a neighbour of it."""


class Setting(NamedTuple):
    """What is to be trained, and how. A limit that ``limits`` leaves out is the machine's memory."""

    shape: GptShape
    parallel: Parallel
    batch: MicroBatch
    zero_stage: Literal[1, 2, 3]
    limits: Limits = Limits()
    optimizer: OptimizerSettings = OptimizerSettings()

    def device_bytes(self, sheet: HardwareSheet) -> int:
        """What a run may fill of a device."""
        given = self.limits.device_bytes
        return int(DEVICE_PART * sheet.device.memory_bytes.value) if given is None else given

    def workload(self, sheet: HardwareSheet) -> Workload:
        limits = msgspec.structs.replace(self.limits, device_bytes=self.device_bytes(sheet))
        if limits.pinned_host_bytes is None:
            limits = msgspec.structs.replace(limits, pinned_host_bytes=int(HOST_PART * sheet.host.memory_bytes.value))
        return gpt_workload(
            self.shape, self.parallel, self.batch, zero_stage=self.zero_stage, limits=limits, optimizer=self.optimizer
        )


class Interval(NamedTuple):
    low: float
    high: float


class Outcome(NamedTuple):
    """A setting on a machine.

    Attributes:
        other: what people run without a plan: the faster of stock Megatron with and without
            ``--overlap-param-gather``, or at zero stage 3 the best plan by all-gathers alone.
        compared_with: what ``other`` is.
        by_option_us: iteration times of stock Megatron by that option; none at zero stage 3.
        gathers: the best by all-gathers alone. ``best``: the best of all.
        memory: the bill of the pipeline rank that holds most, by ``best``.
        short: why it does not fit the device, where it does not.
        interval: of the gain.
    """

    setting: Setting
    rounds: FewRounds
    other: Plan
    compared_with: str
    gathers: Plan
    best: Plan
    memory: RankMemory
    short: str | None
    by_option_us: dict[str, float]
    interval: Interval = Interval(-inf, inf)

    @property
    def answer(self) -> str:
        """``helps``, ``does not help`` or ``cannot tell``, by the rule of ``plan``."""
        return answer_of(self.interval.low, self.interval.high)

    @property
    def effort(self) -> int:
        """Steps and gathers of one simulation."""
        ranks = [rank for made in self.best.schedules for rank in made.ranks]
        gathers = sum(len(rank.start.unshard) + sum(len(step.unshard) for step in rank.steps) for rank in ranks)
        return self.rounds.steps + 2 * gathers

    @property
    def gain(self) -> float:
        return 1 - self.best.times.iteration_time_us / self.other.times.iteration_time_us


class Advice(NamedTuple):
    """An advice.

    Attributes:
        iteration_us: interval of the iteration time over ``draws`` machines.
        changed: other settings by what is changed, judged on the two machines where the setting that was asked for
            gains least and most.
        left_out: settings that were not tried because the workload is large.
    """

    sheet: HardwareSheet
    outcome: Outcome
    iteration_us: Interval
    draws: int
    changed: dict[str, Outcome | InputError]
    left_out: tuple[str, ...]


def advise(setting: Setting, sheet: HardwareSheet) -> Advice:
    """Simulate a setting and its neighbours on the machine of ``sheet``.

    Raises:
        InputError: the ranks do not fit the machine, or at zero stage 3 a layer does not fit the device.
    """
    outcome = judged(setting, sheet)
    draws = max(FEWEST_DRAWS, min(MOST_DRAWS, EFFORT // 3 // (2 * outcome.effort)))
    machines = list(_drawn_machines(sheet, draws))
    pairs = [_times_on(outcome, machine) for machine in machines]
    spent = (PLANS + 2 * draws) * outcome.effort
    outcome = outcome._replace(interval=_interval(outcome, pairs))
    ordered = sorted(range(draws), key=lambda number: (1 - pairs[number][0] / pairs[number][1], pairs[number][0]))
    ends = [machines[ordered[0]], machines[ordered[-1]]]
    changed: dict[str, Outcome | InputError] = {}
    left_out = []
    for name, other in neighbours(setting):
        if spent > EFFORT and len(changed) >= FEWEST_NEIGHBOURS:
            left_out.append(name)
            continue
        try:
            tried = judged(other, sheet, fewest=True)
        except InputError as error:
            changed[name] = error
            continue
        pairs_at_ends = [] if tried.best is tried.other else [_times_on(tried, machine) for machine in ends]
        changed[name] = tried._replace(interval=_interval(tried, pairs_at_ends))
        spent += (FEWEST_PLANS + 2 * len(pairs_at_ends)) * tried.effort
    return Advice(
        sheet,
        outcome,
        Interval(min(best for best, _ in pairs), max(best for best, _ in pairs)),
        draws,
        changed,
        tuple(left_out),
    )


def judged(setting: Setting, sheet: HardwareSheet, *, fewest: bool = False) -> Outcome:
    """The best quick plan of a setting, and what to compare it with.

    Raises:
        InputError: as :func:`advise`.
    """
    workload, short = setting.workload(sheet), None
    try:
        workload = with_headroom(workload)
    except InputError as error:
        if setting.zero_stage == 3:
            raise
        short = error.message
        workload = msgspec.structs.replace(workload, limits=msgspec.structs.replace(workload.limits, device_bytes=None))
    table = estimate(sheet, workload, setting.batch)
    rounds = FewRounds(workload)
    timings = rounds.timings(table)
    plans = list(quick_plans(rounds, timings, fewest=fewest))
    if not plans:
        raise InputError("no plan fits the device", field="limits.device_bytes", value=workload.limits.device_bytes)
    gathers = min((plan for plan in plans if by_all_gathers(plan)), key=_time)
    best = min(plans, key=_time)
    bills = memory_bill(best.schedules[-1], rounds.parts[-1][0])
    memory = max((bill.memory for bill in bills), key=lambda memory: memory.device_total_bytes)
    options = {}
    if setting.zero_stage < 3:
        options = {OVERLAPPED: plans[0], SYNCHRONOUS: synchronous_plan(rounds, timings)}
    name = min(
        options, key=lambda name: _time(options[name]), default=f"the best of all-gathers alone ({gathers.name})"
    )
    by_option_us = {name: _time(plan) for name, plan in options.items()}
    other = options.get(name, gathers)
    return Outcome(setting, rounds, other, name, gathers, best, memory, short, by_option_us)


def _interval(outcome: Outcome, pairs: list[tuple[float, float]]) -> Interval:
    """The interval of a gain from iteration times on drawn machines, with the simulator's own error: a plan cannot gain
    more than the other one waits for groups, nor lose more than its own transfers take."""
    if outcome.best is outcome.other:
        return Interval(0.0, 0.0)
    gains = [outcome.gain, *(1 - best / other for best, other in pairs)]
    best, other = outcome.best.times, outcome.other.times
    transfers = sum(best.busy_us.get(link, 0.0) for link in ("gpu", "cpu", "nvme", "publish"))
    up, down = (WIDTH * min(MODEL_ERROR, us / other.iteration_time_us) for us in (other.exposed_us, transfers))
    return Interval(
        outcome.gain - hypot(outcome.gain - min(gains), down), outcome.gain + hypot(max(gains) - outcome.gain, up)
    )


def _time(plan: Plan) -> float:
    return plan.times.iteration_time_us


def _drawn_machines(sheet: HardwareSheet, count: int) -> Iterator[HardwareSheet]:
    draw = random.Random(0)
    strata = {field: draw.sample(range(count), count) for field, figure in figures(sheet) if figure.low is not None}
    for number in range(count):

        def choose(field: str, figure: Figure, number=number) -> float:
            if field not in strata:
                return figure.value
            part = (strata[field][number] + draw.random()) / count
            end = figure.ends[part > 0.5]
            return figure.value * (end / figure.value) ** abs(2 * part - 1)

        yield drawn(sheet, choose)


def _times_on(outcome: Outcome, machine: HardwareSheet) -> tuple[float, float]:
    """Iteration times of the plan and of what it is compared with."""
    rounds = outcome.rounds
    timings = rounds.timings(estimate(machine, rounds.parts[0][0], outcome.setting.batch))
    best, other = (rounds.times(timings, plan.schedules) for plan in (outcome.best, outcome.other))
    return best.iteration_time_us, other.iteration_time_us


def neighbours(setting: Setting) -> Iterator[tuple[str, Setting]]:
    """Settings of the same model, GPUs and global batch that differ in one option, with its name and value."""
    parallel, batch, layers = setting.parallel, setting.batch, setting.shape.layers
    stage = 1 if setting.zero_stage == 3 else 3
    yield f"--zero-stage {stage}", setting._replace(zero_stage=stage)
    samples = parallel.num_microbatches * batch.micro_batch_size * parallel.dp
    for size in (batch.micro_batch_size * 2, batch.micro_batch_size // 2):
        if size and samples % (size * parallel.dp) == 0:
            changed = _parallel(parallel, num_microbatches=samples // size // parallel.dp)
            if changed:
                name = f"--micro-batch-size {size}"
                yield name, setting._replace(parallel=changed, batch=batch._replace(micro_batch_size=size))
    for pp in (parallel.pp // 2, parallel.pp * 2):
        dp, rest = divmod(parallel.dp * parallel.pp, pp) if pp else (0, 1)
        vp = parallel.vp if pp > 1 else 1
        if rest or not dp or layers % (pp * vp) or samples % (batch.micro_batch_size * dp):
            continue
        number = samples // batch.micro_batch_size // dp
        changed = _parallel(
            parallel,
            pipeline_model_parallel_size=pp,
            virtual_pipeline_model_parallel_size=vp,
            data_parallel_size=dp,
            num_microbatches=number,
        )
        if changed:
            yield f"--pipeline-model-parallel-size {pp}", setting._replace(parallel=changed)
    for vp in (parallel.vp // 2, parallel.vp * 2):
        if vp and parallel.pp > 1 and layers % (parallel.pp * vp) == 0:
            changed = _parallel(parallel, virtual_pipeline_model_parallel_size=vp)
            if changed:
                yield f"--num-virtual-stages-per-pipeline-rank {vp}", setting._replace(parallel=changed)
    if batch.recompute != "full":
        yield "--recompute-granularity full", setting._replace(batch=batch._replace(recompute="full"))


def _parallel(parallel: Parallel, **sizes) -> Parallel | None:
    """``parallel`` with other sizes and the order that goes with them; None where Megatron refuses it."""
    changed = msgspec.structs.replace(parallel, microbatch_group_size_per_vp_stage=None, **sizes)
    changed = msgspec.structs.replace(changed, order=megatron_order(changed.pp, changed.vp))
    try:
        changed.check()
    except InputError:
        return None
    return changed
