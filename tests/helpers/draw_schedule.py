"""Random valid schedules with everything that a schedule can say, down to single layers.

Unlike the planner's ``random`` policy, which fetches and frees per step, this walks layer by
layer, and every choice comes from a ``random.Random``: Hypothesis' own, so that a failing
schedule is shrunk.
"""

import random

from msgspec.structs import replace

from megatron_ext.planner.assemble import Freed, Placed, assemble
from megatron_ext.planner.random_plan import random_groups, with_slots
from megatron_ext.planner.reroute import by_cpu_shard, with_host_shards
from megatron_ext.schedule import footprint, match, validate
from megatron_ext.schedule import user_defined_schedule as schedule_file
from megatron_ext.schedule.group_facts import can_rest_on_host, largest_gradient, largest_region, make_group
from megatron_ext.schedule.memory_bill import copies_of_whole, memory_bill
from megatron_ext.schedule.user_defined_schedule import Predicted, Schedule, StateSlots, StepSlots
from megatron_ext.workload.nodes import has_hierarchy
from megatron_ext.workload.optimizer_settings import OptimizerSettings
from megatron_ext.workload.route import HIERARCHICAL, SYMMETRIC
from megatron_ext.workload.state_layout import LINE_BYTES
from megatron_ext.workload.step_order import steps_of_ranks
from megatron_ext.workload.workload import Workload


def draw_schedule(draw, workload: Workload, routes=("gpu", "cpu"), symmetric: bool = False) -> Schedule:
    """A valid schedule of ``workload``; ``draw`` is a ``random.Random``. ``symmetric``: copy engines gather all groups
    that go by ``gpu``."""

    def algorithm(group) -> str | None:
        if symmetric:
            return SYMMETRIC
        legs = has_hierarchy(workload.parallel, group.pp_rank, group.ranks)
        return draw.choice((None, HIERARCHICAL)) if legs else None

    groups, uses = [], []
    for chunk in workload.chunks:
        for part in random_groups(chunk, draw):
            group = make_group(workload, chunk.pp_rank, chunk.model_chunk_id, part)
            groups.append(replace(group, algorithm=algorithm(group)))
            layers = [layer for parameter in part for layer in parameter.uses]
            uses.append((min(layers), max(layers)))
    walk = _zero3 if workload.zero_stage == 3 else _zero1
    placed, freed = [], []
    for pp_rank in range(workload.parallel.pp):
        own = [index for index, group in enumerate(groups) if group.pp_rank == pp_rank]
        unshards, reshards = walk(draw, workload, pp_rank, own, groups, uses)
        unshards = [item._replace(route=draw.choice(routes)) for item in unshards]
        placed.append(with_slots(unshards, workload.limits.nvme_slots, draw, ("gpu",)))
        freed.append(reshards)
    return assemble(workload, groups, placed, freed, planner="drawn")


GRADIENTS = (None, "sharded", "host")


def prepared(draw, workload: Workload, path, routes=("gpu", "cpu", "nvme"), gradients=GRADIENTS) -> Schedule:
    """A drawn schedule with its own peak as the limit, checked and written to ``path``."""
    schedule = draw_schedule(draw, workload, routes)
    if draw.random() < 0.7:
        if draw.random() < 0.7 and can_rest_on_host(workload) and workload.zero_stage == 3:
            schedule = by_cpu_shard(schedule)
        schedule = with_host_shards(schedule, workload)
    schedule = with_states(draw, with_gradients(draw, schedule, workload, gradients), workload)
    return _saved(schedule, workload, path)


def _saved(schedule: Schedule, workload: Workload, path) -> Schedule:
    peak = max(footprint.device_peaks(schedule))
    schedule = replace(schedule, limits=replace(schedule.limits, whole_parameter_bytes=peak))
    validate.validate(schedule)
    match.match(schedule, workload)
    schedule_file.save(path, schedule)
    return schedule


def with_gradients(draw, schedule: Schedule, workload: Workload, kinds=GRADIENTS) -> Schedule:
    """The schedule with gradients that come and go, drawn of every group; at zero stage 1 all stay whole."""
    if workload.zero_stage == 1:
        return schedule
    shared = {
        (chunk.pp_rank, chunk.model_chunk_id, p.name)
        for chunk in workload.chunks
        for p in chunk.parameters
        if p.shared_embedding
    }
    groups = []
    for group in schedule.groups:
        kind = draw.choice(kinds)
        if any((group.pp_rank, group.model_chunk_id, name) in shared for name in group.parameters):
            kind = None
        every = draw.randint(1, workload.parallel.num_microbatches) if kind is not None else 1
        alone = kind is not None and draw.random() < 0.4
        groups.append(replace(group, gradients=kind, reduce_every=every, alone=alone))
    return replace(schedule, groups=tuple(groups))


def with_states(draw, schedule: Schedule, workload: Workload) -> Schedule:
    """The schedule with the optimizer states of drawn groups on the drive, and of others on the device, where the
    optimizer steps on the host."""
    if not workload.optimizer.on_host or draw.random() < 0.3:
        return schedule
    chosen = [index for index in range(len(schedule.groups)) if draw.random() < 0.4]
    schedule = states_on_drive(schedule, workload, chosen, slots=draw.randint(2, 3))
    return states_on_device(
        schedule, [index for index in range(len(schedule.groups)) if index not in chosen and draw.random() < 0.5]
    )


def states_on_device(schedule: Schedule, chosen: list[int]) -> Schedule:
    """The schedule with the optimizer states of those of the groups ``chosen`` on the device that can be stepped
    there."""
    groups = list(schedule.groups)
    for index in chosen:
        if groups[index].gradients != "host" and groups[index].shard_rests is None:
            groups[index] = replace(groups[index], states_rest="device")
    return replace(schedule, groups=tuple(groups))


def states_on_drive(schedule: Schedule, workload: Workload, chosen: list[int], slots: int) -> Schedule:
    """The schedule with the optimizer states of the groups ``chosen``, and of no others, on the drive."""
    groups = tuple(
        replace(group, states_rest="nvme" if index in chosen else None) for index, group in enumerate(schedule.groups)
    )
    if not chosen:
        return replace(schedule, groups=groups, state_slots=None)
    size = max(largest_region(schedule.groups[index], workload) for index in chosen)
    return replace(schedule, groups=groups, state_slots=StateSlots(slots=slots, slot_bytes=size))


def with_step_slots(schedule: Schedule, workload: Workload, slots: int, cast: str, gradients: float = 1) -> Schedule:
    """The schedule with slots for so many of the largest gradients each, through which the host's optimizer steps."""
    need = max(largest_gradient(group, workload) for group in schedule.groups if group.states_rest is None)
    size = int(need * gradients) // LINE_BYTES * LINE_BYTES
    return replace(schedule, step_slots=StepSlots(slots=slots, slot_bytes=size, cast=cast))


def on_drive(workload, zero_stage: int, path, seed: int, every: int, rollback_bytes: int | None = None):
    """A drawn schedule whose states rest on the drive, those of every ``every``-th group excepted; and its workload."""
    workload = replace(workload, zero_stage=zero_stage, optimizer=OptimizerSettings(on_host=True))
    schedule = prepared(random.Random(seed), workload, path, routes=("gpu", "cpu"))
    chosen = [index for index in range(len(schedule.groups)) if index % every != every - 1]
    schedule = states_on_drive(schedule, workload, chosen, slots=2 + seed % 2)
    schedule = replace(schedule, rollback_bytes=rollback_bytes)
    match.match(validate.validate(schedule), workload)
    schedule_file.save(path, schedule)
    return schedule, workload


def with_own_peak(schedule: Schedule, workload: Workload) -> Schedule:
    """The schedule with its own peak of device bytes as the limit."""
    memory = tuple(bill.memory for bill in memory_bill(schedule, workload))
    exposed = (0.0,) * len(memory)
    predicted = Predicted(iteration_time_us=1.0, exposed_us=exposed, peak_bytes={}, busy_us={}, memory=memory)
    limits = replace(schedule.limits, device_bytes=max(rank.device_total_bytes for rank in memory))
    return validate.validate(replace(schedule, predicted=predicted, limits=limits))


def never_whole(draw, workload: Workload, path, routes=("gpu", "cpu")) -> Schedule:
    """A drawn schedule, written to ``path``, with a limit that has no room for all parameters of a rank."""
    for _ in range(1000):
        schedule = with_own_peak(prepared(draw, workload, path, routes), workload)
        if any(copies_of_whole(schedule)):
            schedule_file.save(path, schedule)
            return schedule
    raise AssertionError


def reduced(workload: Workload, zero_stage: int, path, kind: str) -> Schedule:
    """A schedule whose gradients are all reduced at every visit and kept as ``kind``, for negative controls."""
    schedule = draw_schedule(random.Random(1), replace(workload, zero_stage=zero_stage))
    groups = tuple(replace(group, gradients=kind) for group in schedule.groups)
    return _saved(replace(schedule, groups=groups), replace(workload, zero_stage=zero_stage), path)


def from_shards(workload: Workload, path) -> Schedule:
    """A schedule in which every group comes by ``cpu_shard``, for negative controls."""
    workload = replace(workload, zero_stage=3)
    schedule = by_cpu_shard(draw_schedule(random.Random(1), workload, routes=("gpu",)))
    return _saved(with_host_shards(schedule, workload), workload, path)


def hosted(workload: Workload, zero_stage: int, path) -> Schedule:
    """A schedule in which every group goes by its host copy, for negative controls."""
    return prepared(random.Random(1), replace(workload, zero_stage=zero_stage), path, routes=("cpu",))


def _zero1(draw, workload: Workload, pp_rank: int, own, groups, uses):
    """Every group once, at any place before its first use."""
    steps = steps_of_ranks(workload.parallel)[pp_rank]
    pp, unshards = workload.parallel.pp, []
    for group in own:
        chunk = groups[group].model_chunk_id
        first = next(index for index, step in enumerate(steps) if step.stage // pp == chunk)
        need_by = draw.randint(max(0, first - draw.choice((0, 2))), first)
        issue = draw.randint(-1, need_by)
        at = -1
        if issue >= 0 and draw.random() < 0.5:
            top = workload.chunk(pp_rank, steps[issue].stage // pp).num_layers - 1
            if issue < need_by:
                at = draw.randint(0, top)
            elif steps[issue].stage // pp == chunk:
                at = draw.randint(0, uses[group][0])
        unshards.append(Placed(group, "", issue, need_by, at))
    draw.shuffle(unshards)
    return sorted(unshards, key=lambda item: (item.issue, item.at)), []


def _zero3(draw, workload: Workload, pp_rank: int, own, groups, uses):
    """Walk all layers of all steps; before each, bring what it needs and some of what comes
    later; behind each, free some of what is not needed at once."""
    pp = workload.parallel.pp
    steps = steps_of_ranks(workload.parallel)[pp_rank]
    chunks = [step.stage // pp for step in steps]
    eager, keep = draw.choice((0.0, 0.1, 0.4)), draw.choice((0.0, 0.5, 0.9))
    whole: dict[int, int] = {}  # group -> its need_by
    unshards, reshards = [], []

    def span(group: int, kind: str) -> tuple[int, int]:
        """First and last layer that use a group, in the direction of the step."""
        first, last = uses[group]
        return (first, last) if kind == "F" else (last, first)

    def next_use(group: int, index: int, passed) -> int | None:
        """The next step that uses a group whose turn in this step has not come yet."""
        for later in range(max(index, 0), len(steps)):
            if chunks[later] == groups[group].model_chunk_id and not (later == index and passed(group)):
                return later
        return None

    def bring_early(index: int, at: int, passed) -> None:
        for group in own:
            if group in whole or draw.random() >= eager:
                continue
            use = next_use(group, index, passed)
            if use is None or use > index + 6:
                continue
            earliest = use if use == index else index + 1
            whole[group] = draw.randint(earliest, use)
            unshards.append(Placed(group, "", index, whole[group], at))

    bring_early(-1, -1, lambda group: False)
    for index, step in enumerate(steps):
        num_layers = workload.chunk(pp_rank, chunks[index]).num_layers
        order = range(num_layers) if step.kind == "F" else range(num_layers - 1, -1, -1)
        sign = 1 if step.kind == "F" else -1
        for turn, layer in enumerate(order):
            at = -1 if turn == 0 and draw.random() < 0.5 else layer
            mine = [group for group in own if groups[group].model_chunk_id == chunks[index]]
            for group in mine:
                if span(group, step.kind)[0] == layer and group not in whole:
                    whole[group] = index
                    unshards.append(Placed(group, "", index, index, at))
            bring_early(
                index,
                at,
                lambda group, sign=sign, step=step, layer=layer: sign * span(group, step.kind)[0] <= sign * layer,
            )
            at = -1 if turn == num_layers - 1 and draw.random() < 0.5 else layer
            for group, need_by in sorted(whole.items()):
                busy = group in mine and sign * span(group, step.kind)[1] > sign * layer
                if need_by <= index and not busy and draw.random() >= keep:
                    reshards.append(Freed(group, index, at))
                    del whole[group]
    return unshards, reshards
