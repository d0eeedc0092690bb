"""What a setting takes within given device bytes, by quick plans; and the bytes and the time that it takes at least."""

from collections import Counter
from collections.abc import Iterable
from functools import cache
from math import prod
from typing import NamedTuple

from msgspec.structs import replace

from megatron_ext.bounds.least_loads import layer_bytes
from megatron_ext.bounds.lower_bound import lower_bound
from megatron_ext.bounds.memory_headroom import groups_of_rank, with_most_headroom
from megatron_ext.cost.cost_table import CostTable
from megatron_ext.formats.errors import InputError
from megatron_ext.formats.rank_memory import RankMemory
from megatron_ext.planner.candidate import Candidate
from megatron_ext.planner.effort import number_of_steps
from megatron_ext.planner.finish import finished
from megatron_ext.planner.fit.setting import Setting
from megatron_ext.planner.passes.rest_states import bytes_to_reserve
from megatron_ext.planner.quick_plan import FewRounds, TimedPlan, Times, fastest, quick_schedules, relieved_schedules
from megatron_ext.planner.stock import STOCK_RULES
from megatron_ext.planner.without_plan import stock_bytes
from megatron_ext.schedule.bill_by_step import fullest_steps
from megatron_ext.schedule.group_facts import gradient_bytes
from megatron_ext.schedule.host_slots import step_gradient_bytes
from megatron_ext.schedule.memory_bill import memory_bill, on_nodes, resting_bytes
from megatron_ext.schedule.user_defined_schedule import Schedule
from megatron_ext.simulator.timing import Timing
from megatron_ext.workload.activation_bytes import kept_by_chunk
from megatron_ext.workload.bucket_layout import ITEM_BYTES
from megatron_ext.workload.gpt_shapes import GptShape
from megatron_ext.workload.parallel import Parallel
from megatron_ext.workload.workload import EXPERTS, Workload, optimizer_bytes

PROVEN_STEPS = 1024
"""Up to this many steps times layers of a stage, the full lower bound is computed; above, only the bound of compute."""


class Stock(NamedTuple):
    """Stock Megatron: its bytes on the device and in a node's host memory, and its iteration times by option."""

    device_bytes: int
    host_bytes: int
    by_option_us: dict[str, float]

    @property
    def us(self) -> float:
        return min(self.by_option_us.values())

    @property
    def option(self) -> str:
        """The option with which it is faster."""
        return min(self.by_option_us, key=self.by_option_us.__getitem__)


class Choice(NamedTuple):
    """A setting with a plan.

    Attributes:
        memory: the memory bill of the rank that holds most on its device.
        host_bytes, drive_bytes: bytes of one node.
        bound_us: a time that no plan of the setting can beat.
        planned: whether the complete planner made the plan, instead of a quick plan.
    """

    setting: Setting
    rounds: FewRounds
    schedules: tuple[Schedule, ...]
    times: Times
    memory: RankMemory
    host_bytes: int
    drive_bytes: int
    bound_us: float
    planned: bool

    @property
    def us(self) -> float:
        return self.times.iteration_time_us

    @property
    def device_bytes(self) -> int:
        return self.memory.device_total_bytes

    @property
    def tokens_per_s(self) -> float:
        return self.setting.tokens / self.us * 1e6


def floor_bytes(setting: Setting) -> int:
    """Device bytes that every plan needs at least, computed quickly. It counts only the transformer layers of the first
    rank, with as many micro-batches in flight as there are pipeline ranks."""
    parallel, optimizer, item = setting.parallel, setting.optimizer, ITEM_BYTES[setting.shape.dtype]
    chunks = setting.shape.stages(parallel)[:: parallel.pp]
    kept = [kept_by_chunk(chunk, setting.shape, setting.batch, parallel) for chunk in chunks]
    held = sum(sum(saved) for saved, _ in kept) * min(parallel.pp, parallel.num_microbatches)
    held += max(anew for _, anew in kept)
    kinds = Counter(kind for chunk in chunks for kind in chunk)
    numels = {kind: _numel(setting.shape, parallel, kind) for kind in kinds}
    dense, experts = (sum(number * numels[kind][of] for kind, number in kinds.items()) for of in (0, 1))
    numel = dense + experts
    held += numel * item if setting.zero_stage < 3 else 0
    held += numel * optimizer.gradient_item_bytes if setting.zero_stage == 1 else 0
    if not optimizer.on_host:
        states = optimizer.main_item_bytes(setting.shape.dtype) + optimizer.state_item_bytes
        held += (dense // parallel.dp + experts // parallel.expert_dp) * states
    return held


@cache
def _numel(shape: GptShape, parallel: Parallel, kind: str) -> tuple[int, int]:
    """Number of parameters of a layer on one rank: dense parameters, and experts' parameters."""
    dense = experts = 0
    for name, size in shape.layer(parallel.tensor_model_parallel_size, kind, parallel.ep, parallel.etp).items():
        if EXPERTS in name:
            experts += prod(size)
        else:
            dense += prod(size)
    return dense, experts


def least_bytes(workload: Workload) -> int:
    """Device bytes of the rank that holds most, with everything elsewhere that may be elsewhere. No plan holds less.

    While a layer computes, its parameters are whole, and in its backward also its gradient. An optimizer on the device
    gets all gradients on the device for its step.
    """
    zero_stage, most = workload.zero_stage, 0
    comes_and_goes = zero_stage > 1
    for rank in range(workload.parallel.pp):
        groups = groups_of_rank(workload, rank, "host" if zero_stage == 3 else None, single=False)
        whole = sum(group.bytes for group in groups) if zero_stage < 3 else 0
        own = [layer_bytes(chunk) for chunk in workload.chunks_of_rank(rank)]
        gradient = sum(gradient_bytes(group, workload) for group in groups) / (sum(g.bytes for g in groups) or 1)
        if comes_and_goes:
            groups = [replace(group, gradients="host") for group in groups]
        moments = (
            saved + (size if zero_stage == 3 else 0) + (size * gradient if comes_and_goes and backward else 0)
            for chunk, backward, by_layer in fullest_steps(workload, rank)
            for saved, size in zip(by_layer, own[chunk])
        )
        comes = int(max([*moments, step_gradient_bytes(groups, workload)]))
        most = max(most, sum(resting_bytes(groups, workload)[0].values()) + whole + comes)
    return most


def bound_us(workload: Workload, timing: Timing) -> float:
    """A time that no plan of the setting can beat."""
    if number_of_steps(workload) * max(chunk.num_layers for chunk in workload.chunks) <= PROVEN_STEPS:
        return lower_bound(with_most_headroom(workload), timing)
    parallel, found = workload.parallel, 0.0
    work = [[(sum(t.forward), sum(t.backward)) for t in row] for row in timing.layers]
    for rank in range(parallel.pp):  # its steps, between the first forwards and the last backwards of the ranks before
        around = sum(sum(work[before][0]) + 2 * timing.p2p_us for before in range(rank))
        found = max(found, around + parallel.num_microbatches * sum(map(sum, work[rank])))
    if workload.optimizer.on_host:
        return found
    return found + max(timing.optimizer_us(optimizer_bytes(workload, rank)) for rank in range(parallel.pp))


def quick_choice(
    setting: Setting, workload: Workload, table: CostTable, bound: float, *, closely: bool = False
) -> Choice:
    """The fastest of a few quick plans that keep the limits. With ``closely`` there are more plans, among them plans
    that leave room for optimizer states and for casting parameters on the device.

    Raises:
        InputError: no quick plan keeps the limits.
    """
    rounds = FewRounds(workload)
    timings = rounds.timings(table)
    refused: InputError | None = None
    found: list[Choice] = []

    def place(made: Iterable[tuple[str, tuple[Schedule, ...]]]) -> None:
        nonlocal refused
        for plan in fastest(rounds, timings, made):
            try:
                found.append(choice_of(setting, rounds, table, _placed(rounds, timings, plan), bound))
            except InputError as error:
                refused = error

    place(quick_schedules(rounds, timings, closely=closely))
    if not found:
        raise refused or InputError("no quick plan keeps the limits", field="limits")
    if closely:
        best = min(found, key=lambda choice: choice.us).schedules[-1]
        for size in bytes_to_reserve(Candidate(rounds.parts[-1][0], timings[-1], best)):
            less = workload.with_limits(device_bytes=(workload.limits.device_bytes or 0) - size)
            place(relieved_schedules(FewRounds(less), timings, closely=True))
    return min(found, key=lambda choice: choice.us)


def stock_of(rounds: FewRounds, timings: list[Timing], held: tuple[int, int] | None = None) -> Stock:
    """Stock Megatron at zero stage 1, without regard to limits. ``held``: its bytes, if they are known."""
    schedules = {name: [rule(part) for part, _ in rounds.parts] for name, rule in STOCK_RULES.items()}
    times = {name: rounds.times(timings, made).iteration_time_us for name, made in schedules.items()}
    return Stock(*(held or stock_bytes(rounds.parts[-1][0])), times)


def _placed(rounds: FewRounds, timings: list[Timing], plan: TimedPlan) -> TimedPlan:
    """The plan with optimizer states where :func:`finished` puts them for the part with the most micro-batches. They
    rest at the same places in all parts."""
    last = finished(Candidate(rounds.parts[-1][0], timings[-1], plan.schedules[-1])).schedule
    same = {name: getattr(last, name) for name in ("groups", "state_slots", "step_slots", "rollback_bytes")}
    limits = rounds.parts[0][0].limits
    made = (*(replace(schedule, **same) for schedule in plan.schedules[:-1]), last)
    made = tuple(replace(schedule, limits=limits) for schedule in made)
    return plan._replace(schedules=made, times=rounds.times(timings, made))


def choice_of(setting: Setting, rounds: FewRounds, table: CostTable, plan: TimedPlan, bound: float) -> Choice:
    """A choice from a quick plan.

    Raises:
        InputError: the plan does not keep the limits, or keeps states on a drive whose costs are not known.
    """
    schedule = plan.schedules[-1]
    memories = [bill.memory for bill in memory_bill(schedule, rounds.parts[-1][0])]
    memory = max(memories, key=lambda memory: memory.device_total_bytes)
    of_ranks = [sum(held.host_bytes.values()) for held in memories], [held.nvme_bytes for held in memories]
    host, drive = (max(on_nodes(rounds.parts[-1][0], held)) for held in of_ranks)
    limits = rounds.parts[0][0].limits
    if drive and table.routes.nvme is None:
        why = "is short, and what a drive for optimizer states costs is not known"
        raise InputError(why, field="limits.host_bytes", value=limits.host_bytes)
    for name, held in (("device_bytes", memory.device_total_bytes), ("host_bytes", host)):
        limit = getattr(limits, name)
        if limit is not None and held > limit:
            raise InputError(f"{held} bytes are held, {held - limit} too many", field=f"limits.{name}", value=limit)
    return Choice(setting, rounds, plan.schedules, plan.times, memory, host, drive, bound, planned=False)
