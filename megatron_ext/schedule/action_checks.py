"""Checks the actions of one pipeline rank through one iteration.

[Note: Life of a group within one iteration]
A group is SHARDED when the iteration starts: the optimizer step has just made every whole
copy stale. ``unshard`` makes it UNSHARDING, reaching its ``need_by`` step makes it WHOLE,
``reshard`` makes it SHARDED again. A step may compute only on groups that are WHOLE, or whose
``need_by`` is this step: then the first layer that uses the group waits. Every layer of the
step's chunk is used, in forward and in backward. At the end of the iteration the groups that are
still whole are dropped. Zero stages 1 and 2 gather every group exactly once and never free it.
"""

import math
from typing import NoReturn

from megatron_ext.formats.errors import InputError
from megatron_ext.schedule.footprint import actions_in_order
from megatron_ext.schedule.user_defined_schedule import Reshard, Schedule, StageIn, StepActions, Unshard
from megatron_ext.workload.route import ON_DRIVE, kind_of
from megatron_ext.workload.step import Step


class InvalidSchedule(InputError):
    """A schedule that must not train; ``pp_rank`` and ``step_index`` say where it fails."""

    def __init__(self, message: str, *, pp_rank: int | None = None, step_index: int | None = None, **where):
        super().__init__(message, **where)
        self.pp_rank, self.step_index = pp_rank, step_index

    @classmethod
    def at_step(cls, pp_rank: int, index: int, message: str, field: str, value: object, file) -> "InvalidSchedule":
        """An error at ``field`` of step ``index`` of a pipeline rank, or without ``field`` at the step; index -1 is the
        start."""
        where = f"ranks[{pp_rank}].start" if index < 0 else f"ranks[{pp_rank}].steps[{index}]"
        field = f"{where}.{field}" if field else where
        return cls(message, pp_rank=pp_rank, step_index=index, file=file, field=field, value=value)


class RankCheck:
    """The state of one pipeline rank's groups and slots while its steps are checked in order.

    Args:
        destinations: by group, the places that it is published to.
    """

    def __init__(self, schedule: Schedule, pp_rank: int, destinations: dict[int, set[str]], file):
        self.schedule, self.pp_rank, self.file, self.destinations = schedule, pp_rank, file, destinations
        self.rank, self.groups, self.limits = schedule.ranks[pp_rank], schedule.groups, schedule.limits
        self.own = [i for i, group in enumerate(self.groups) if group.pp_rank == pp_rank]
        self.of_chunk = [[] for _ in range(schedule.parallel.vp)]
        for index in self.own:
            self.of_chunk[self.groups[index].model_chunk_id].append(index)
        self.index, self.chunk = -1, -1  # of the present step
        self.ready_at: dict[int, int] = {}  # group -> step index from which it is whole
        self.slot_of: dict[int, int] = {}  # group -> slot it is staged in
        self.in_slot: dict[int, int] = {}  # slot -> group
        self.resident = 0
        limit = self.limits.whole_parameter_bytes
        self.limit = math.inf if limit is None else limit
        if schedule.zero_stage < 3:  # whole parameters never leave the device
            self.resident = sum(self.groups[i].bytes for i in self.own)
            if self.resident > self.limit:
                said = f"needs {self.resident} bytes of whole parameters on pipeline rank {pp_rank}, {self._excess()}"
                field = "limits.whole_parameter_bytes"
                raise InvalidSchedule(said, pp_rank=pp_rank, file=file, field=field, value=self.limit)

    def _excess(self) -> str:
        return f"{self.resident - self.limit} more than limits.whole_parameter_bytes"

    def refuse(self, message: str, field: str = "", value: object = ...) -> NoReturn:
        """Refuse a field of the current step, or the step."""
        raise InvalidSchedule.at_step(self.pp_rank, self.index, message, field, value, self.file)

    def run(self) -> None:
        """Check all steps. Raises InvalidSchedule at the first action that is refused."""
        for n, action in enumerate(self.rank.start.stage_in):
            self._stage_in(action, f"stage_in[{n}]")
        for n, action in enumerate(self.rank.start.unshard):
            if action.at >= 0:
                self.refuse("no layer computes before the first step", f"unshard[{n}].at", action.at)
            self._unshard(action, f"unshard[{n}]")
        for index, entry in enumerate(self.rank.steps):
            self.index = index
            self.chunk = Step.parse(entry.step).model_chunk_id(self.schedule.parallel.pp)
            self._step(entry)

    def _step(self, entry: StepActions) -> None:
        """Check a step, with actions at layers in the order in which the layers run."""
        for n, action in enumerate(entry.stage_in):
            self._stage_in(action, f"stage_in[{n}]")
        actions, within = actions_in_order(entry), set()  # groups that are freed within the step, after their layers
        if [action for action in actions if isinstance(action, Unshard)] != [*entry.unshard]:
            self.refuse("unshards must be listed in the order in which their layers run", "unshard")
        unshards, fields = 0, {id(action): f"reshard[{n}]" for n, action in enumerate(entry.reshard)}
        for action in actions:
            if isinstance(action, Unshard):
                self._unshard(action, f"unshard[{unshards}]")
                unshards += 1
            elif action.at >= 0:
                self._reshard(action, fields[id(action)])
                within.add(action.group)
        for group in self.of_chunk[self.chunk]:
            if self.ready_at.get(group, math.inf) > self.index and group not in within:
                self.refuse(f"step {entry.step} computes on group {group}, which is not whole then")
        for action in entry.reshard:
            if action.at < 0:
                self._reshard(action, fields[id(action)])

    def _own_group(self, group: int, field: str) -> None:
        if not 0 <= group < len(self.groups):
            self.refuse(f"there are {len(self.groups)} groups", field, group)
        if self.groups[group].pp_rank != self.pp_rank:
            self.refuse(f"group {group} belongs to pipeline rank {self.groups[group].pp_rank}", field, group)

    def _stage_in(self, action: StageIn, field: str) -> None:
        group, slot, size = action.group, action.slot, self.limits.nvme_slot_bytes
        self._own_group(group, field)
        if ON_DRIVE not in self.destinations.get(group, ()):
            self.refuse(f"group {group} is staged in but never published to {ON_DRIVE}", field)
        if not 0 <= slot < self.limits.nvme_slots:
            self.refuse(f"limits.nvme_slots is {self.limits.nvme_slots}", f"{field}.slot", slot)
        if slot in self.in_slot:
            self.refuse(f"slot {slot} still holds group {self.in_slot[slot]}", f"{field}.slot", slot)
        if group in self.slot_of:
            self.refuse(f"group {group} is staged already", field)
        if size is not None and self.groups[group].bytes > size:
            held = self.groups[group].bytes
            self.refuse(f"group {group} has {held} bytes, more than limits.nvme_slot_bytes = {size}", field)
        self.slot_of[group] = slot
        self.in_slot[slot] = group

    def _unshard(self, action: Unshard, field: str) -> None:
        group = action.group
        self._own_group(group, field)
        if group in self.ready_at:
            self.refuse(f"group {group} is unsharded already", field)
        need_by = self._check_places(action, field)
        self._check_route(action, field)
        if kind_of(action.route).staged:
            if group not in self.slot_of:
                self.refuse(f"group {group} goes by {action.route} but was not staged in", field)
            del self.in_slot[self.slot_of.pop(group)]
        self.ready_at[group] = need_by
        if self.schedule.zero_stage == 3:
            self.resident += self.groups[group].bytes
            if self.resident > self.limit:
                said = f"unsharding group {group} makes {self.resident} bytes whole on pipeline rank {self.pp_rank}"
                self.refuse(f"{said}, {self._excess()}", field)

    def _check_places(self, action: Unshard, field: str) -> int:
        """Check the place of an unshard and the step that waits for it; return that step's index."""
        index, said = self.index, f"{field}.need_by"
        if action.need_by < -1:
            self.refuse("expected a step, or -1 for this one", said, action.need_by)
        self._check_at(action, field)
        need_by = index if action.need_by < 0 else action.need_by
        if index < 0 and action.need_by < 0:
            self.refuse("an unshard at the start must have a need_by", said, action.need_by)
        if need_by < index:
            self.refuse(f"need_by lies before its unshard at step {index}", said, action.need_by)
        if need_by >= len(self.rank.steps):
            self.refuse(f"there are {len(self.rank.steps)} steps", said, action.need_by)
        chunk = self.groups[action.group].model_chunk_id
        if action.at >= 0 and need_by == index and chunk != self.chunk:
            where = f"when the step begins, not at a layer of chunk {self.chunk}"
            self.refuse(f"group {action.group} of chunk {chunk} is needed {where}", f"{field}.at", action.at)
        return need_by

    def _check_route(self, action: Unshard, field: str) -> None:
        """Check that the copy that a group is unsharded from exists."""
        number, group, route, kind = action.group, self.groups[action.group], action.route, kind_of(action.route)
        goes, none = f"group {number} goes by {route} but", f"there is no copy of its {group.bytes} bytes"
        if kind.shard_from_host and group.shard_rests != "host":
            said = f"group {number} needs a shard that rests in host memory"
        elif kind.needs_device_shard and group.shard_rests == "host":
            said = f"{goes} its shard rests in host memory: {none} on the device"
        elif kind.copy is not None and kind.copy not in self.destinations.get(number, ()):
            said = f"{goes} is never published there: {none}"
        else:
            return
        self.refuse(said, f"{field}.route", route)

    def _check_at(self, action: Unshard | Reshard, field: str) -> None:
        if action.at < -1:
            self.refuse("expected a layer, or -1 for none", f"{field}.at", action.at)

    def _reshard(self, action: Reshard, field: str) -> None:
        group = action.group
        self._own_group(group, field)
        self._check_at(action, field)
        if self.schedule.zero_stage < 3:
            self.refuse(f"zero stage {self.schedule.zero_stage} never frees a group", field)
        ready = self.ready_at.pop(group, None)
        if ready is None:
            self.refuse(f"group {group} is not unsharded", field)
        if ready > self.index:
            self.refuse(f"group {group} is freed before its need_by step {ready}", field)
        self.resident -= self.groups[group].bytes
