"""Checks which schedules may train: every use of a group comes after a finished gather of this iteration.

[Note: Life of a group within one iteration]
A group is SHARDED when the iteration starts: the optimizer step has just made every whole
copy stale. ``unshard`` makes it UNSHARDING, reaching its ``need_by`` step makes it WHOLE,
``reshard`` makes it SHARDED again. A step may compute only on groups that are WHOLE (or whose
``need_by`` is this step: then the first layer that uses the group waits). Every layer of the
step's chunk is used, in forward and in backward. At the end of the iteration whatever is
still whole is dropped. Zero stages 1 and 2 gather every group exactly once and never free it.
"""

import math

from megatron_ext.formats.checks import Checker
from megatron_ext.formats.errors import InputError
from megatron_ext.formats.versions import check_version
from megatron_ext.schedule.check_figures import check_figures
from megatron_ext.schedule.footprint import over_limit, pinned_host_bytes
from megatron_ext.schedule.state_placement import check_state_slots
from megatron_ext.schedule.step_slots import check_step_slots
from megatron_ext.schedule.user_defined_schedule import Schedule, decode
from megatron_ext.workload.nodes import algorithm_of_nodes, check_spread
from megatron_ext.workload.route import HIERARCHICAL, SYMMETRIC
from megatron_ext.workload.step_order import steps_of_ranks


class InvalidSchedule(InputError):
    """A schedule that must not train; ``pp_rank`` and ``step_index`` say where it fails."""

    def __init__(self, message: str, *, pp_rank: int | None = None, step_index: int | None = None, **where):
        super().__init__(message, **where)
        self.pp_rank, self.step_index = pp_rank, step_index

    @classmethod
    def at_step(cls, pp_rank: int, index: int, message: str, field: str, value: object, file) -> "InvalidSchedule":
        """At ``field`` of the step ``index`` of a pipeline rank."""
        field = f"ranks[{pp_rank}].steps[{index}].{field}"
        return cls(message, pp_rank=pp_rank, step_index=index, file=file, field=field, value=value)


def load(path) -> Schedule:
    """Read and validate a schedule file.

    Raises:
        InputError: in one line that names file, field and value.
    """
    return validate(decode(path), file=path)


def validate(schedule: Schedule, *, file=None) -> Schedule:
    """Check everything that can be checked without the workload, and return the schedule.

    Raises:
        InvalidSchedule: at the first action that could compute on parameters that are not
            whole and fresh, exceed a limit, or differ from Megatron's order of steps.
    """
    check_version("user_defined_schedule", schedule.schema_version, file=file, error=InvalidSchedule)
    schedule.parallel.check(file=file)
    _check_groups(schedule, file)
    destinations = _check_publish(schedule, file)
    check_state_slots(schedule, file=file)
    check_step_slots(schedule, file=file)
    check_figures(schedule, Checker(file, InvalidSchedule))
    parallel = schedule.parallel
    if len(schedule.ranks) != parallel.pp:
        raise InvalidSchedule(
            f"expected one entry for each of the {parallel.pp} pipeline ranks",
            file=file,
            field="ranks",
            value=len(schedule.ranks),
        )
    number = 2 * parallel.vp * parallel.num_microbatches
    for index, rank in enumerate(
        schedule.ranks
    ):  # before the order is computed: a small file must be refused in little time
        if len(rank.steps) < number:
            raise InvalidSchedule(
                f"expected {number} steps", file=file, field=f"ranks[{index}].steps", value=len(rank.steps)
            )
    expected = steps_of_ranks(parallel)
    for index, rank in enumerate(schedule.ranks):
        if rank.pp_rank != index:
            raise InvalidSchedule(
                f"expected {index}: ranks are stored in order",
                file=file,
                field=f"ranks[{index}].pp_rank",
                value=rank.pp_rank,
            )
        _check_steps(rank, expected[index], file)
        _RankCheck(schedule, index, destinations, file).run()
    if schedule.publish:
        _check_host_copies(schedule, file)
    return schedule


_NEEDS = {
    HIERARCHICAL: "needs data-parallel groups that span nodes, with several ranks on each, as many on one as on "
    "another",
    SYMMETRIC: "needs data-parallel groups of several ranks that share one node",
}


def _check_groups(schedule: Schedule, file) -> None:
    parallel = schedule.parallel
    owner: dict[tuple[int, int, str], int] = {}
    for index, group in enumerate(schedule.groups):
        field = f"groups[{index}]"
        parallel.check_place(group.pp_rank, group.model_chunk_id, file=file, field=field, error=InvalidSchedule)
        if group.bytes <= 0:
            raise InvalidSchedule("must be positive", file=file, field=f"{field}.bytes", value=group.bytes)
        if group.ranks not in (parallel.dp, parallel.expert_dp):
            ours = f"{parallel.dp} data-parallel ranks" + f" or {parallel.expert_dp} expert-data-parallel" * (
                parallel.expert_dp != parallel.dp
            )
            said = f"expected {ours}, which share its shards"
            raise InvalidSchedule(said, file=file, field=f"{field}.ranks", value=group.ranks)
        if group.algorithm not in (None, algorithm_of_nodes(parallel, group.pp_rank, group.ranks)):
            message = _NEEDS[group.algorithm]
            raise InvalidSchedule(message, file=file, field=f"{field}.algorithm", value=group.algorithm)
        if group.shard_rests == "host" and schedule.zero_stage < 3:
            message = f"zero stage {schedule.zero_stage} keeps whole groups, and the shards in them, on the device"
            raise InvalidSchedule(message, file=file, field=f"{field}.shard_rests", value=group.shard_rests)
        _check_gradients(schedule, index, file)
        if not group.parameters:
            raise InvalidSchedule("a group needs at least one parameter", file=file, field=f"{field}.parameters")
        for name in group.parameters:
            key = (group.pp_rank, group.model_chunk_id, name)
            if key in owner:
                raise InvalidSchedule(
                    f"is in two groups, {owner[key]} and {index}", file=file, field=f"{field}.parameters", value=name
                )
            owner[key] = index


def _check_gradients(schedule: Schedule, index: int, file) -> None:
    """What a group keeps of its gradients, and how often they are reduced."""
    group, visits = schedule.groups[index], schedule.parallel.num_microbatches
    if group.gradients is not None and schedule.zero_stage == 1:
        message = "zero stage 1 keeps whole gradients: use zero stage 2 or 3"
        raise InvalidSchedule(message, file=file, field=f"groups[{index}].gradients", value=group.gradients)
    if group.gradients is None and group.alone:
        message = "gradients that stay whole are allocated once"
        raise InvalidSchedule(message, file=file, field=f"groups[{index}].alone", value=True)
    if group.gradients is None and group.reduce_every != 1:
        message = "gradients that stay whole are reduced once an iteration"
    elif not 1 <= group.reduce_every <= visits:
        message = f"expected 1 to {visits}, the backward steps of the chunk in an iteration"
    else:
        return
    raise InvalidSchedule(message, file=file, field=f"groups[{index}].reduce_every", value=group.reduce_every)


def _check_publish(schedule: Schedule, file) -> dict[int, set[str]]:
    destinations: dict[int, set[str]] = {}
    for index, entry in enumerate(schedule.publish):
        field = f"publish[{index}]"
        if not 0 <= entry.group < len(schedule.groups):
            raise InvalidSchedule(
                f"there are {len(schedule.groups)} groups", file=file, field=f"{field}.group", value=entry.group
            )
        if entry.group in destinations:
            raise InvalidSchedule("is published twice", file=file, field=f"{field}.group", value=entry.group)
        if not entry.to or len(set(entry.to)) != len(entry.to):
            raise InvalidSchedule("expected cpu, nvme or both", file=file, field=f"{field}.to", value=list(entry.to))
        destinations[entry.group] = set(entry.to)
    return destinations


def _check_host_copies(schedule: Schedule, file) -> None:
    """Copies need as many replicas on one node as on another, and memory."""
    try:
        check_spread(schedule.parallel)
    except InputError as error:
        raise InvalidSchedule(error.message, file=file, field=error.field, value=error.value) from None
    limit = schedule.limits.pinned_host_bytes
    for node, need, more in over_limit(pinned_host_bytes(schedule), limit):
        said = f"node {node} needs {need} bytes of pinned host memory, {more} more than allowed"
        raise InvalidSchedule(said, file=file, field="limits.pinned_host_bytes", value=limit)


def _check_steps(rank, expected, file) -> None:
    field = f"ranks[{rank.pp_rank}].steps"
    for index, (entry, step) in enumerate(zip(rank.steps, expected)):
        if entry.step != str(step):
            said = f"Megatron runs {step} here"
            raise InvalidSchedule.at_step(rank.pp_rank, index, said, "step", entry.step, file)
    if len(rank.steps) != len(expected):
        raise InvalidSchedule(f"expected {len(expected)} steps", file=file, field=field, value=len(rank.steps))


class _RankCheck:
    """Checks the actions of one pipeline rank through one iteration."""

    def __init__(self, schedule: Schedule, pp_rank: int, destinations, file):
        self.schedule, self.pp_rank, self.file = schedule, pp_rank, file
        self.destinations = destinations
        self.rank = schedule.ranks[pp_rank]
        self.groups = schedule.groups
        self.own = [i for i, group in enumerate(self.groups) if group.pp_rank == pp_rank]
        self.of_chunk = [[] for _ in range(schedule.parallel.vp)]
        for index in self.own:
            self.of_chunk[self.groups[index].model_chunk_id].append(index)
        self.ready_at: dict[int, float] = {}  # group -> step index from which it is whole
        self.issued_in: dict[int, tuple[int, int]] = {}  # group -> (step index, at)
        self.gathers = dict.fromkeys(self.own, 0)
        self.slot_of: dict[int, int] = {}  # group -> slot it is staged in
        self.in_slot: dict[int, int] = {}  # slot -> group
        self.resident = 0
        limit = schedule.limits.whole_parameter_bytes
        self.limit = math.inf if limit is None else limit
        if schedule.zero_stage < 3:  # whole parameters never leave the device
            self.resident = sum(self.groups[i].bytes for i in self.own)
            if self.resident > self.limit:
                self._fail(
                    f"needs {self.resident} bytes of whole parameters on pipeline rank {pp_rank}, "
                    f"{self.resident - self.limit} more than limits.whole_parameter_bytes",
                    "limits.whole_parameter_bytes",
                    self.limit,
                )

    def _fail(self, message: str, field: str, value: object = ..., step_index: int | None = None):
        raise InvalidSchedule(
            message, pp_rank=self.pp_rank, step_index=step_index, file=self.file, field=field, value=value
        )

    def run(self) -> None:
        prefix = f"ranks[{self.pp_rank}]"
        for n, action in enumerate(self.rank.start.stage_in):
            self._stage_in(action, -1, f"{prefix}.start.stage_in[{n}]")
        for n, action in enumerate(self.rank.start.unshard):
            if action.at >= 0:
                self._fail("no layer computes before the first step", f"{prefix}.start.unshard[{n}].at", action.at)
            self._unshard(action, -1, f"{prefix}.start.unshard[{n}]")
        pp = self.schedule.parallel.pp
        for index, entry in enumerate(self.rank.steps):
            field = f"{prefix}.steps[{index}]"
            chunk = self._chunk = int(entry.step.partition("F")[0].partition("B")[0]) // pp
            for n, action in enumerate(entry.stage_in):
                self._stage_in(action, index, f"{field}.stage_in[{n}]")
            if any(action.at >= 0 for action in entry.unshard) or any(action.at >= 0 for action in entry.reshard):
                self._step_by_layer(index, entry, field)
            else:
                for n, action in enumerate(entry.unshard):
                    self._unshard(action, index, f"{field}.unshard[{n}]")
            for group in self.of_chunk[chunk]:
                if self.ready_at.get(group, math.inf) > index and self._not_within(group, index):
                    self._fail(
                        f"step {entry.step} computes on group {group}, which is not whole then", field, step_index=index
                    )
            for n, action in enumerate(entry.reshard):
                if action.at < 0:
                    self._reshard(action, index, f"{field}.reshard[{n}]")
            self._within = frozenset()
        if self.schedule.zero_stage < 3:
            for group, count in self.gathers.items():
                if count != 1:
                    self._fail(
                        f"zero stage {self.schedule.zero_stage} gathers every group once an iteration; "
                        f"group {group} is gathered {count} times",
                        prefix,
                    )

    _chunk = -1
    """Model chunk of the current step."""

    _within: frozenset = frozenset()
    """Groups that were whole for their layers of the current step and freed inside it."""

    def _not_within(self, group: int, index: int) -> bool:
        return group not in self._within

    def _step_by_layer(self, index: int, entry, field: str) -> None:
        """Check a step whose actions stand at layers, in the order in which the layers run."""
        backward = "B" in entry.step
        key = lambda item: (item[1].at >= 0, -item[1].at if backward else item[1].at)
        unshards = sorted(((n, a) for n, a in enumerate(entry.unshard)), key=key)
        if [n for n, _ in unshards] != list(range(len(unshards))):
            self._fail(
                "unshards must be listed in the order in which their layers run", f"{field}.unshard", step_index=index
            )
        reshards = [(n, a) for n, a in enumerate(entry.reshard) if a.at >= 0]
        position = lambda at: -at if backward else at
        pending = list(unshards)
        freed = set()
        for n, action in sorted(reshards, key=lambda item: position(item[1].at)):
            while pending and (pending[0][1].at < 0 or position(pending[0][1].at) <= position(action.at)):
                m, earlier = pending.pop(0)
                self._unshard(earlier, index, f"{field}.unshard[{m}]")
            self._reshard(action, index, f"{field}.reshard[{n}]", inside=True)
            freed.add(action.group)
        for m, action in pending:
            self._unshard(action, index, f"{field}.unshard[{m}]")
        self._within = frozenset(freed)

    def _own_group(self, group: int, field: str, index: int) -> None:
        if not 0 <= group < len(self.groups):
            self._fail(f"there are {len(self.groups)} groups", field, group, index)
        if self.groups[group].pp_rank != self.pp_rank:
            self._fail(f"group {group} belongs to pipeline rank {self.groups[group].pp_rank}", field, group, index)

    def _stage_in(self, action, index: int, field: str) -> None:
        self._own_group(action.group, field, index)
        if "nvme" not in self.destinations.get(action.group, ()):
            self._fail(f"group {action.group} is staged in but never published to nvme", field, step_index=index)
        if not 0 <= action.slot < self.schedule.limits.nvme_slots:
            self._fail(f"limits.nvme_slots is {self.schedule.limits.nvme_slots}", f"{field}.slot", action.slot, index)
        if action.slot in self.in_slot:
            self._fail(
                f"slot {action.slot} still holds group {self.in_slot[action.slot]}", f"{field}.slot", action.slot, index
            )
        if action.group in self.slot_of:
            self._fail(f"group {action.group} is staged already", field, step_index=index)
        size = self.schedule.limits.nvme_slot_bytes
        if size is not None and self.groups[action.group].bytes > size:
            self._fail(
                f"group {action.group} has {self.groups[action.group].bytes} bytes, a slot limits.nvme_slot_bytes = "
                f"{size}",
                field,
                step_index=index,
            )
        self.slot_of[action.group] = action.slot
        self.in_slot[action.slot] = action.group

    def _unshard(self, action, index: int, field: str) -> None:
        group = action.group
        self._own_group(group, field, index)
        if group in self.ready_at:
            self._fail(f"group {group} is unsharded already", field, step_index=index)
        if action.need_by < -1:
            self._fail("expected a step, or -1 for this one", f"{field}.need_by", action.need_by, index)
        self._check_at(action, index, field)
        need_by = index if action.need_by < 0 else action.need_by
        if index < 0 and action.need_by < 0:
            self._fail("an unshard at the start must say its need_by", f"{field}.need_by", action.need_by, index)
        if need_by < index:
            self._fail(f"need_by lies before its unshard at step {index}", f"{field}.need_by", action.need_by, index)
        if need_by >= len(self.rank.steps):
            self._fail(f"there are {len(self.rank.steps)} steps", f"{field}.need_by", action.need_by, index)
        if action.at >= 0 and need_by == index and self.groups[group].model_chunk_id != self._chunk:
            self._fail(
                f"group {group} of chunk {self.groups[group].model_chunk_id} is needed when the step begins, not at a "
                f"layer of chunk {self._chunk}",
                f"{field}.at",
                action.at,
                index,
            )
        if action.route == "cpu_shard" and (self.groups[group].shard_rests != "host" or self.groups[group].ranks == 1):
            self._fail(
                f"group {group} needs a shard that rests in host memory, and several data-parallel ranks",
                f"{field}.route",
                action.route,
                index,
            )
        self._check_copy(action, index, field)
        if action.route == "nvme":
            if group not in self.slot_of:
                self._fail(f"group {group} goes by nvme but was not staged in", field, step_index=index)
            del self.in_slot[self.slot_of.pop(group)]
        self.gathers[group] += 1
        self.ready_at[group] = need_by
        self.issued_in[group] = (index, action.at)
        if self.schedule.zero_stage == 3:
            self.resident += self.groups[group].bytes
            if self.resident > self.limit:
                self._fail(
                    f"unsharding group {group} makes {self.resident} bytes whole on pipeline rank {self.pp_rank}, "
                    f"{self.resident - self.limit} more than limits.whole_parameter_bytes",
                    field,
                    step_index=index,
                )

    def _check_copy(self, action, index: int, field: str) -> None:
        """Check that the copy exists from which a group is unsharded."""
        group = action.group
        if action.route == "gpu" and self.groups[group].shard_rests == "host":
            self._fail(
                f"group {group} goes by gpu but its shard rests in host memory: {self.groups[group].bytes} bytes have "
                "no copy on the device to come from",
                f"{field}.route",
                action.route,
                index,
            )
        if action.route in ("cpu", "nvme") and action.route not in self.destinations.get(group, ()):
            self._fail(
                f"group {group} goes by {action.route} but is never published there: {self.groups[group].bytes} bytes "
                "have no copy to come from",
                f"{field}.route",
                action.route,
                index,
            )

    def _check_at(self, action, index: int, field: str) -> None:
        if action.at < -1:
            self._fail("expected a layer, or -1 for none", f"{field}.at", action.at, index)

    def _reshard(self, action, index: int, field: str, inside: bool = False) -> None:
        self._own_group(action.group, field, index)
        self._check_at(action, index, field)
        if self.schedule.zero_stage < 3:
            self._fail(f"zero stage {self.schedule.zero_stage} never frees a group", field, step_index=index)
        ready = self.ready_at.get(action.group)
        if ready is None:
            self._fail(f"group {action.group} is not unsharded", field, step_index=index)
        if ready > index:
            self._fail(f"group {action.group} is freed before its need_by step {ready}", field, step_index=index)
        del self.ready_at[action.group], self.issued_in[action.group]
        self.resident -= self.groups[action.group].bytes
