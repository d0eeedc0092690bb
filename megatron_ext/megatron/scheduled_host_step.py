"""Lets Megatron's host optimizer (``--optimizer-cpu-offload``) step as the schedule says: through rooms, beside the
backward, beside the next iteration, with states on a drive.

[Note: What is changed of the host optimizer]
HybridDeviceOptimizer copies all gradients to memory that it keeps, steps, and copies parameters back through memory
that is not page-locked. Chosen parameters get optimizers of their own, one a unit (host_optimizers.py), whose gradients
and parameters the runtime moves (runtime/host_step). All else is its own: which parameters it steps, the values of
``param_groups``, states in checkpoints.
* Where units may be stepped beside the backward (``rollback_bytes``), each lies in one group. When Megatron calls
  ``step``, it goes through the optimizers whose early step does not stand; the others have done all that it would do.
  Gradients that Megatron changes after their reduce, other than by one factor for all, cannot be validated: the
  embedding that two pipeline ranks share, and norms that tensor-parallel ranks add up. Their groups wait.
* Where updates are delayed, ``step`` copies gradients to the host as ever and hands the rest to DelayedUpdate, which
  steps with the learning rate and all else of the iteration that the gradients are of.
* Checkpoints take states from a method of DistributedOptimizer. For states on the drive it maps the drive's file into
  memory, so that saving needs no memory for all states. What is loaded is loaded before: see late_memory.py.
Source: megatron/core/optimizer/cpu_offloading/hybrid_optimizer.py, the same in core_v0.12 to core_v0.19.
"""

from collections.abc import Callable
from functools import partial
from math import inf
from typing import Any

import torch

from megatron_ext.formats.errors import InputError
from megatron_ext.megatron.host_optimizers import (
    copies_of,
    divide,
    gradient_of,
    optimizers_on_host,
    own_optimizers,
    refuse_late_load,
    without,
)
from megatron_ext.megatron.late_memory import take_over
from megatron_ext.megatron.own_step_bytes import count_delayed
from megatron_ext.megatron.shards import places_of_groups
from megatron_ext.runtime.device import device_of
from megatron_ext.runtime.group import Group
from megatron_ext.runtime.host_step.after_norm import AfterNorm
from megatron_ext.runtime.host_step.delayed import DelayedUpdate
from megatron_ext.runtime.host_step.drive_states import DriveStates, DriveUnit
from megatron_ext.runtime.host_step.early import EarlySteps, EarlyUnit
from megatron_ext.runtime.host_step.flat_adamw import FlatAdamW, lay_out
from megatron_ext.runtime.host_step.room import Link, OwnRooms, Piece, SharedRooms
from megatron_ext.runtime.host_step.unit import HostUnit
from megatron_ext.runtime.issuer import Issuer
from megatron_ext.runtime.page_locked import large_tensor
from megatron_ext.runtime.part import Part
from megatron_ext.runtime.publisher import Publisher
from megatron_ext.schedule.user_defined_schedule import Schedule
from megatron_ext.workload.drive_reads import DriveReads
from megatron_ext.workload.state_layout import ITEM_BYTES, LINE_BYTES, region_bytes, tensor_bytes


class HostStep:
    """The host's step on one rank.

    Args:
        optimizers: Megatron's DistributedOptimizer objects of this rank, with states or before their first step.
        bucket_groups, groups: of this rank, by index in the schedule; not empty.
        publisher: of the host copies, or None.
        nvme_path: directory on the drive, where states rest there.
        delay: as :class:`DelayedUpdate` takes ``begun`` and ``after``; None: no update is delayed.

    Attributes:
        early, delayed: those that there are.

    Raises:
        InputError: an optimizer does not step on the host, a slot is too small, or the drive is full.
    """

    def __init__(
        self,
        schedule: Schedule,
        optimizers: list,
        bucket_groups: dict,
        groups: dict[int, Group],
        publisher: Publisher | None,
        issuer: Issuer,
        recorder,
        nvme_path,
        delay: tuple[int, int] | None,
    ):
        self._schedule, self._bucket_groups, self._issuer = schedule, bucket_groups, issuer
        self._groups, self._nvme_path, self._recorder = groups, nvme_path, recorder
        self.device = device_of(next(iter(groups.values())).whole)
        self.early: EarlySteps | None = None
        self.delayed: DelayedUpdate | None = None
        self._staging: dict[torch.Tensor, torch.Tensor] = {}  # of a delayed update, by the host's parameter
        real = [optimizer for optimizer in optimizers if not getattr(optimizer, "is_stub_optimizer", False)]
        if delay is not None:
            staged = self._make_staging(optimizers_on_host(real, delay[1]))
        self._chosen = {
            index: group
            for index, group in groups.items()
            if schedule.groups[index].states_rest != "device" and self._has_units(index, delay is not None)
        }
        narrow = any(getattr(own.buckets[0], "grad_data").dtype is not torch.float32 for own in bucket_groups.values())  # noqa: B009
        self.link = self._make_link(narrow)
        self.rooms = self._make_rooms()
        self._after_norm = AfterNorm(self.link)
        self.states: list[DriveStates] = []
        self._parts: dict[torch.Tensor, torch.Tensor] = {}  # where each parameter's gradient lies when it is reduced
        units: dict = {}
        for optimizer in real:
            units[optimizer] = self._units_of(optimizer)
        common: dict[str, Any] = dict(device=self.device, issuer=issuer, recorder=recorder)
        if delay is not None:
            self.delayed = DelayedUpdate(staged, *delay, publisher, **common)
            if recorder is not None:
                count_delayed(schedule, real, self._buckets(), recorder, self.delayed)
        elif schedule.rollback_bytes is not None:
            self._make_early(units, publisher, common)
        for optimizer, own in units.items():
            if own:
                self._replace_step(optimizer.optimizer, own)
        self.units = [unit for own in units.values() for unit in own]
        for unit in self.units:
            unit.recorder = recorder

    @property
    def parts(self) -> list[Part]:
        return [part for part in (self.early, self.delayed) if part is not None]

    def _has_units(self, index: int, delayed: bool) -> bool:
        """Whether parameters of the group ``index`` are taken out of the host optimizer's own."""
        if self._schedule.groups[index].states_rest == "nvme" or self._schedule.step_slots is not None or delayed:
            return True
        return self._may_be_early(index)

    def _may_be_early(self, index: int) -> bool:
        late = any(map(_added_up_later, self._bucket_groups[index].params))
        return self._schedule.rollback_bytes is not None and not late

    # Memory.

    def _make_staging(self, hybrids: list) -> list[tuple[torch.Tensor, torch.Tensor]]:
        staged = []
        for hybrid in hybrids:
            for shard, copy in hybrid.gpu_params_map_cpu_copy.items():
                own = self._staging[copy] = self.device.host_tensor(shard.numel(), shard.dtype).view(shard.shape)
                staged.append((own.copy_(shard.detach()), shard))
        return staged

    def _make_link(self, narrow: bool) -> Link:
        slots, on_device = self._schedule.step_slots, 0
        if slots is not None and slots.cast == "device":
            on_device = slots.slot_bytes
        on_drive = [index for index in self._chosen if self._schedule.groups[index].states_rest == "nvme"]
        largest = 0
        if on_drive and narrow and not self._staging:
            numels = [p.numel() for index in on_drive for p in self._bucket_groups[index].params]
            largest = tensor_bytes(min(max(numels), max(self._groups[index].shard.numel() for index in on_drive)))
        place = next(iter(self._groups.values())).whole.device
        return Link(self.device, place, on_device, max(on_device, largest) if narrow else 0, self._recorder)

    def _make_rooms(self) -> OwnRooms | SharedRooms | None:
        slots = self._schedule.step_slots
        if self._staging:
            return None
        if slots is None:
            return OwnRooms(self.link)
        if all(self._schedule.groups[index].states_rest is not None for index in self._chosen):
            return None
        return SharedRooms(self.link, slots.slots, slots.slot_bytes, slots.cast == "device")

    # Units.

    def _buckets(self) -> list[tuple[object, Group]]:
        return [(self._bucket_groups[index].buckets[0], group) for index, group in self._chosen.items()]

    def _units_of(self, optimizer) -> list[HostUnit]:
        """The units of Megatron's ``optimizer``, in the order in which they are stepped."""
        hybrid, schedule = optimizer.optimizer, self._schedule
        places = list(places_of_groups([optimizer], self._buckets()))
        if not places:
            return []
        copies = copies_of(hybrid, [shard for *_, shard in places], "the schedule's steps of the host need", "groups[]")
        pieces: dict[torch.Tensor, Piece] = {}
        members: dict[bool, dict[int, list[torch.Tensor]]] = {False: {}, True: {}}  # of the drive, by group
        for group, start, end, shard in places:
            parameter, own = copies[shard], schedule.groups[group.index]
            pieces[parameter] = self._piece(parameter, shard, own)
            members[own.states_rest == "nvme"].setdefault(group.index, []).append(parameter)
            self._parts[parameter] = self._reduced_part(group)[start:end]
        made = self._on_drive(optimizer, members[True], pieces) if members[True] else []
        return made + (self._in_memory(hybrid, members[False], pieces) if members[False] else [])

    def _piece(self, parameter: torch.Tensor, shard: torch.Tensor, group) -> Piece:
        if self._staging:
            return Piece(parameter, lambda: None, self._staging[parameter], shard_on_host=True)
        kept = group.gradients == "host", group.shard_rests == "host"
        return Piece(parameter, partial(gradient_of, shard), shard, *kept)

    def _in_memory(self, hybrid, members: dict[int, list], pieces: dict) -> list[HostUnit]:
        slots = self._schedule.step_slots
        size, most = lambda parameter: tensor_bytes(parameter.numel()), inf if slots is None else slots.slot_bytes
        divided, groups = self._divide(hybrid, members, size, most)
        alignment = LINE_BYTES if slots is not None else ITEM_BYTES
        units = []
        for group, optimizer in zip(groups, own_optimizers(hybrid, divided), strict=True):
            own = [pieces[parameter] for one in optimizer.param_groups for parameter in one["params"]]
            units.append(HostUnit(group, optimizer, own, self.rooms, alignment))
            for piece in own if self.rooms is not None else ():
                hybrid.cpu_copy_map_grad.pop(piece.parameter, None)
                piece.parameter.grad = None
            locked = slots is not None and slots.cast == "device"
            if locked or isinstance(optimizer, FlatAdamW):
                lay_out(optimizer, self.device.host_tensor if locked else large_tensor)
            if isinstance(self.rooms, OwnRooms):
                self.rooms.take(units[-1])  # its memory is allocated now
        return units

    def _divide(self, hybrid, members: dict[int, list], size, most: float) -> tuple[list[list[dict]], list[int]]:
        """Parameter groups of each unit, and its group in the schedule. Where they may be stepped beside the backward,
        each unit lies in one group, the last one first, as a backward reduces them."""
        together = (
            [[index] for index in reversed(members)] if self._schedule.rollback_bytes is not None else [[*members]]
        )
        divided = [
            (unit, indices[0])
            for indices in together
            for unit in divide(hybrid, {p for index in indices for p in members[index]}, size, most)
        ]
        return [unit for unit, _ in divided], [group for _, group in divided]

    def _on_drive(self, optimizer, members: dict[int, list], pieces: dict) -> list[HostUnit]:
        hybrid, slots, schedule = optimizer.optimizer, self._schedule.state_slots, self._schedule
        assert slots is not None  # validated
        moments = 2 if issubclass(hybrid.cpu_optimizer_cls, torch.optim.AdamW | torch.optim.Adam) else 1
        size = lambda parameter: region_bytes(parameter.numel(), moments)
        largest = max(size(parameter) for own in members.values() for parameter in own)
        if largest > slots.slot_bytes:
            raise InputError(
                f"a slot is smaller than the states of one parameter, which take {largest} bytes",
                field="state_slots.slot_bytes",
                value=slots.slot_bytes,
            )
        states = DriveStates(
            self._nvme_path,
            moments=moments,
            slots=slots.slots,
            settings=schedule.metadata.options.nvme or DriveReads(),
            link=self.link,
            issuer=self._issuer,
            early=schedule.rollback_bytes is not None,
            room=not self._staging,
            recorder=self._recorder,
        )
        divided, groups = self._divide(hybrid, members, size, slots.slot_bytes)
        for group, one in zip(groups, own_optimizers(hybrid, divided), strict=True):
            own = [pieces[parameter] for part in one.param_groups for parameter in part["params"]]
            states.units.append(DriveUnit(group, one, own, states))
            for piece in own if not self._staging else ():
                hybrid.cpu_copy_map_grad.pop(piece.parameter, None)
                piece.parameter.grad = None
        states.open(take_over(hybrid, {parameter for own in members.values() for parameter in own}))
        self.states.append(states)
        _save_from_drive(optimizer, states)
        return [*states.units]

    # When they are stepped.

    def _make_early(self, units: dict, publisher: Publisher | None, common: dict[str, Any]) -> None:
        assert self._schedule.rollback_bytes is not None
        found, settings = [], []
        for optimizer, own in units.items():
            early = [unit for unit in own if self._may_be_early(unit.group)]
            if own:
                settings.append(_Settings(optimizer))
            for unit in early:
                gradients = [self._parts[piece.parameter] for piece in unit.pieces]
                found.append(EarlyUnit(unit, gradients, settings[-1].inverse_scale))

        def take() -> None:
            for one in settings:
                one.take()

        self.early = EarlySteps(found, self._schedule.rollback_bytes, take, publisher, self.link, **common)
        self._settings = {one.hybrid: one for one in settings}
        for index in {unit.unit.group for unit in found}:
            self._bucket_groups[index].reduced = partial(self.early.reduced, index, None)

    def _reduced_part(self, group: Group) -> torch.Tensor:
        """This rank's part of a group's gradient, where it lies when it is reduced."""
        bucket_group = self._bucket_groups[group.index]
        if bucket_group.gradient is not None:
            return bucket_group.gradient.shard
        gradient = bucket_group.buckets[0].grad_data
        return gradient.narrow(0, group.shard_start, group.shard.numel())

    def _replace_step(self, hybrid, units: list[HostUnit]) -> None:
        refuse_late_load(hybrid)
        if self.delayed is not None:
            vars(hybrid)["step"] = partial(_delayed_step, hybrid, hybrid.step, self.delayed)
            return
        by_optimizer = {unit.optimizer: unit for unit in units}
        copy_others = partial(self._bring_gradients, hybrid, hybrid._set_sub_optimizer_grads, by_optimizer)
        vars(hybrid)["_set_sub_optimizer_grads"] = copy_others
        if self.early is not None:
            step = partial(_validated_step, hybrid, hybrid.step, units, self._settings[hybrid], self.early)
            vars(hybrid)["step"] = step

    def _bring_gradients(self, hybrid, copy_gradients, units: dict[torch.optim.Optimizer, HostUnit]) -> None:
        """In place of the host optimizer's copying of all gradients, into memory that it keeps."""
        with without(hybrid, units) as own:
            copy_gradients()
        stepped = [units[one] for one in own]
        for states in self.states:
            states.expect([unit for unit in stepped if unit in states.units])
        self._after_norm.expect(stepped)

    def close(self) -> None:
        """Behind the end of the parts."""
        for unit in self.units:
            unit.close()
        for states in self.states:
            states.close()
        self.link.close()


def _added_up_later(parameter) -> bool:
    """Whether other ranks' gradients are added to this one's after its reduce."""
    names = ("shared_embedding", "shared", "sequence_parallel", "average_gradients_across_tp_domain")
    return any(getattr(parameter, name, False) for name in names)


class _Settings:
    """What Megatron's ``optimizer`` is to step with for a whole iteration: learning rate, weight decay and all else,
    also the loss scale, which lies on the device."""

    def __init__(self, optimizer):
        self.hybrid, self._scaler, self.taken = optimizer.optimizer, optimizer.grad_scaler, []
        self._scale: float | None = None

    def take(self) -> None:
        self.hybrid._sync_hdo_param_groups_to_sub_optimizers()
        self.taken = self.now()
        self._scale = None if self._scaler is None else float(self._scaler.inv_scale)

    def inverse_scale(self) -> float | None:
        """By which gradients are unscaled; None where they are not scaled."""
        return self._scale

    def now(self) -> list[dict]:
        return [
            {name: value for name, value in group.items() if name != "params"} for group in self.hybrid.param_groups
        ]


def _validated_step(hybrid, step, units: list[HostUnit], settings: _Settings, early: EarlySteps, closure=None) -> None:
    """In place of the host optimizer's ``step``: what has not been stepped early, or does not stand."""
    done = {unit.optimizer for unit in early.finish(units, changed=settings.taken != settings.now())}
    with without(hybrid, done):
        step(closure)
    hybrid._sync_sub_optimizers_state_to_hdo()
    early.ready = True


def _delayed_step(hybrid, step, delayed: DelayedUpdate, closure=None) -> None:
    """In place of the host optimizer's ``step``, whose units write staging tensors."""
    if not delayed.delays:
        step(closure)
        delayed.write_shards()
        return
    delayed.apply()
    hybrid._sync_hdo_param_groups_to_sub_optimizers()
    compute = torch.cuda.current_stream()
    hybrid._d2h_stream.wait_stream(compute)
    with torch.cuda.stream(hybrid._d2h_stream):
        hybrid._set_sub_optimizer_grads()
    compute.wait_stream(hybrid._d2h_stream)  # the next iteration overwrites gradients on the device
    hybrid._cpu_optimizer_map_data_event.clear()
    delayed.take(partial(_step_all, hybrid))


def _step_all(hybrid) -> None:
    """On the thread of the delayed update."""
    for one in hybrid.cpu_optimizers:
        one.step()
    hybrid._sync_sub_optimizers_state_to_hdo()


def _save_from_drive(optimizer, states: DriveStates) -> None:
    """Let what Megatron takes of one parameter's states come from the drive."""
    get: Callable = optimizer._get_main_param_and_optimizer_states

    def read(parameter) -> dict[str, torch.Tensor]:
        group, order = optimizer.model_param_group_index_map[parameter]
        shard = optimizer.optimizer.param_groups[group]["params"][order]
        copy = optimizer.optimizer.gpu_params_map_cpu_copy.get(shard)
        if copy is None or states.unit_of(copy) is None:
            return get(parameter)
        in_memory = {name: value for name, value in get(parameter).items() if value.dim() == 0}  # the step count
        return in_memory | states.read_tensors(copy)

    vars(optimizer)["_get_main_param_and_optimizer_states"] = read
