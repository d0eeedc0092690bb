"""Lets Megatron's host optimizer (``--optimizer-cpu-offload``) step as the schedule says: through step slots, during
the backward, during the next iteration, and with states on a drive.

[Note: What is changed of the host optimizer]
HybridDeviceOptimizer copies all gradients to memory that it keeps, steps, and copies parameters back from memory that
is not page-locked. Chosen parameters get optimizers of their own, one per unit (host_optimizers.py), whose gradients
and parameters the runtime moves (runtime/host_step). The rest is unchanged: which parameters it steps, the values of
``param_groups``, states in checkpoints.
* If units may be stepped during the backward (``rollback_bytes``), each lies in one group. When Megatron calls
  ``step``, it runs only the optimizers whose early step does not stand; for the others nothing is left to do.
  Gradients that Megatron changes after their reduce, other than by one factor for all, cannot be validated: the
  embedding that two pipeline ranks share, and norms that tensor-parallel ranks add up. Their groups are stepped later.
* If updates are delayed, ``step`` passes its units to DelayedUpdate, which steps with the learning rate and the other
  settings of the iteration from which the gradients come.
* Checkpoints take states from a method of DistributedOptimizer. For states on the drive it maps the drive's file into
  memory, so that saving does not need memory for all states. States are loaded earlier: see late_memory.py.
Source: megatron/core/optimizer/cpu_offloading/hybrid_optimizer.py, core_v0.12 to core_v0.19.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from math import inf

import torch

from megatron_ext.megatron.host_optimizers import (
    divide,
    gradient_of,
    own_optimizers,
    refuse_late_load,
    require_steps_on_host,
    settings_of,
    without,
)
from megatron_ext.megatron.late_memory import take_over
from megatron_ext.megatron.own_rank import OwnRank
from megatron_ext.megatron.shards import places_of_groups
from megatron_ext.runtime.group import RankGroup
from megatron_ext.runtime.host_step.after_norm import AfterNorm
from megatron_ext.runtime.host_step.delayed import DelayedUpdate
from megatron_ext.runtime.host_step.drive_states import DriveStates, DriveUnit
from megatron_ext.runtime.host_step.early import EarlySteps, EarlyUnit
from megatron_ext.runtime.host_step.flat_adamw import MOMENTS, FlatAdamW, lay_out_parameters
from megatron_ext.runtime.host_step.room import OwnRooms, Piece, SharedRooms, StepStreams
from megatron_ext.runtime.host_step.unit import HostUnit
from megatron_ext.runtime.page_locked import large_tensor
from megatron_ext.runtime.publisher import Publisher
from megatron_ext.schedule.host_slots import cast_part_bytes
from megatron_ext.schedule.user_defined_schedule import StepSlots
from megatron_ext.workload.drive_reads import DriveReads
from megatron_ext.workload.state_layout import ITEM_BYTES, LINE_BYTES, region_bytes, tensor_bytes

Members = dict[int, list[torch.Tensor]]
"""By group, the host's parameters that belong to this rank's shard."""


class HostStep:
    """The host's step on one rank that has groups.

    Args:
        own: this rank, whose optimizers have states or have not made their first step.
        publisher: the publisher of the host copies, or None.

    Attributes:
        early, delayed: the parts for early and for delayed steps, or None.

    Raises:
        InputError: updates are to be delayed of an optimizer that does not step on the host, or the drive is full.
    """

    def __init__(self, own: OwnRank, publisher: Publisher | None):
        assert own.device is not None
        self._own, self._schedule, self.device = own, own.schedule, own.device
        self.early: EarlySteps | None = None
        self.delayed: DelayedUpdate | None = None
        self._later = own.delay is not None  # whether shards get their new values an iteration later
        if own.delay is not None:
            require_steps_on_host(own.optimizers, own.delay[1])
        chosen = [index for index in own.groups if self._has_units(index)]
        self._buckets = [(bucket, group) for bucket, group in own.buckets if group.index in chosen]
        through_slots = any(self._schedule.groups[index].states_rest is None for index in chosen)
        slots = self._schedule.step_slots if through_slots else None
        self.link = self._make_link(chosen, slots)
        self.rooms: OwnRooms | SharedRooms = OwnRooms(self.link)
        if slots is not None:
            self.rooms = SharedRooms(self.link, slots.slots, slots.slot_bytes, slots.cast == "device")
        self._after_norm = AfterNorm(self.link)
        self.states: list[DriveStates] = []
        self._pieces: dict[torch.Tensor, Piece] = {}  # by the host's parameter
        self._reduced: dict[torch.Tensor, torch.Tensor] = {}  # where each parameter's reduced gradient lies
        units = {optimizer: self._units_of(optimizer) for optimizer in own.optimizers}
        if own.delay is not None:
            self.delayed = DelayedUpdate(self.link, *own.delay, publisher, own.issuer)
        elif self._schedule.rollback_bytes is not None:
            self._make_early(units, publisher, self._schedule.rollback_bytes)
        for optimizer, of_optimizer in units.items():
            if of_optimizer:
                self._replace_step(optimizer.optimizer, of_optimizer)
        self.units = [unit for of_optimizer in units.values() for unit in of_optimizer]

    def _has_units(self, index: int) -> bool:
        """Whether parameters of the group ``index`` are removed from the host optimizer's own optimizers."""
        rest = self._schedule.groups[index].states_rest
        always = rest == "nvme" or self._schedule.step_slots is not None or self._own.delay is not None
        return rest != "device" and (always or self._may_be_early(index))

    def _may_be_early(self, index: int) -> bool:
        names, ranks = self._schedule.groups[index].parameters, self._schedule.parallel.tensor_model_parallel_size
        late = added_up_later(self._own.bucket_groups[index].params, names, ranks)
        return self._schedule.rollback_bytes is not None and not late

    # Memory.

    def _make_link(self, chosen: list[int], slots: StepSlots | None) -> StepStreams:
        casting, buckets = slots.slot_bytes if slots and slots.cast == "device" else 0, self._own.bucket_groups
        outward = 0
        if any(one.buckets[0].grad_data.dtype is not torch.float32 for one in buckets.values()):
            rest = [index for index in chosen if self._later or self._schedule.groups[index].states_rest == "nvme"]
            outward = max([casting, *map(self._largest_gradient, rest)])
        place = next(iter(self._own.groups.values())).whole.device
        return StepStreams(self.device, place, cast_part_bytes(casting), outward, self._own.links)

    def _largest_gradient(self, index: int) -> int:
        """The largest number of bytes, in fp32, of this rank's part of one parameter of the group."""
        parameters, shard = self._own.bucket_groups[index].params, self._own.groups[index].shard
        return tensor_bytes(min(max(parameter.numel() for parameter in parameters), shard.numel()))

    # Units.

    def _units_of(self, optimizer) -> list[HostUnit]:
        """The units of Megatron's ``optimizer``, in the order in which they are stepped."""
        in_memory: Members = {}
        on_drive: Members = {}
        for _, group, start, end, shard in places_of_groups([optimizer], self._buckets):
            planned, parameter = self._schedule.groups[group.index], optimizer.optimizer.gpu_params_map_cpu_copy[shard]
            members = on_drive if planned.states_rest == "nvme" else in_memory
            members.setdefault(group.index, []).append(parameter)
            self._reduced[parameter] = self._reduced_part(group)[start:end]
            kept = planned.gradients == "host", planned.shard_rests == "host"
            self._pieces[parameter] = Piece(parameter, partial(gradient_of, shard), shard, *kept)
        units = self._on_drive(optimizer, on_drive) if on_drive else []
        return units + (self._in_memory(optimizer.optimizer, in_memory) if in_memory else [])

    def _make_units(self, hybrid, members: Members, size, most: float, make: Callable[..., HostUnit]) -> list:
        """Give ``members`` optimizers of their own, each with a total ``size`` of at most ``most`` bytes. Returns the
        unit ``make(group, optimizer, pieces)`` for each. If units may be stepped during the backward, each lies in one
        group, and the last group comes first, as a backward reduces them."""
        apart = self._schedule.rollback_bytes is not None
        together = [[index] for index in reversed(members)] if apart else [[*members]]
        divided = [
            (indices[0], unit)
            for indices in together
            for unit in divide(hybrid, {p for index in indices for p in members[index]}, size, most)
        ]
        units = []
        for (group, _), one in zip(divided, own_optimizers(hybrid, [unit for _, unit in divided]), strict=True):
            pieces = [self._pieces[parameter] for part in one.param_groups for parameter in part["params"]]
            units.append(make(group, one, pieces))
            if isinstance(self.rooms, OwnRooms) and units[-1].rooms is self.rooms:
                self.rooms.make(units[-1])
            for piece in pieces:  # gradients pass through step slots
                hybrid.cpu_copy_map_grad.pop(piece.parameter, None)
                piece.parameter.grad = None
        return units

    def _in_memory(self, hybrid, members: Members) -> list[HostUnit]:
        slots = self._schedule.step_slots

        def make(group: int, optimizer: FlatAdamW, pieces: list[Piece]) -> HostUnit:
            locked = slots is not None and slots.cast == "device"
            lay_out_parameters(optimizer, self.device.host_tensor if locked else large_tensor)
            alignment = ITEM_BYTES if slots is None else LINE_BYTES
            return HostUnit(group, optimizer, pieces, self.rooms, alignment, self._later)

        most = inf if slots is None else slots.slot_bytes
        return self._make_units(hybrid, members, lambda parameter: tensor_bytes(parameter.numel()), most, make)

    def _on_drive(self, optimizer, members: Members) -> list[HostUnit]:
        hybrid, slots = optimizer.optimizer, self._schedule.state_slots
        assert slots is not None  # validated
        size = lambda parameter: region_bytes(parameter.numel(), len(MOMENTS))
        states = DriveStates(
            self._own.nvme_path,
            slots=slots.slots,
            settings=self._schedule.metadata.options.nvme or DriveReads(),
            link=self.link,
            issuer=self._own.issuer,
            early=self._schedule.rollback_bytes is not None,
            rooms=self.rooms if self._later and isinstance(self.rooms, OwnRooms) else None,
        )
        states.units += self._make_units(hybrid, members, size, slots.slot_bytes, partial(DriveUnit, states))
        states.open(take_over(hybrid, {parameter for of_group in members.values() for parameter in of_group}))
        self.states.append(states)
        save_from_drive(optimizer, states)
        return [*states.units]

    # When they are stepped.

    def _make_early(self, units: dict, publisher: Publisher | None, rollback_bytes: int) -> None:
        found: list[EarlyUnit] = []
        self._settings = {one.optimizer: _Settings(one) for one, of_optimizer in units.items() if of_optimizer}
        for optimizer, of_optimizer in units.items():
            for unit in of_optimizer:
                if self._may_be_early(unit.group):
                    reduced = [self._reduced[piece.parameter] for piece in unit.pieces]
                    found.append(EarlyUnit(unit, reduced, self._settings[optimizer.optimizer].inverse_scale))

        def take() -> None:
            for one in self._settings.values():
                one.take()

        self.early = EarlySteps(found, rollback_bytes, take, publisher, self.link, self._own.issuer)
        for index in {unit.unit.group for unit in found}:
            self._own.bucket_groups[index].reduced = partial(self.early.reduced, index, None)

    def _reduced_part(self, group: RankGroup) -> torch.Tensor:
        """This rank's part of a group's gradient, where it lies when it is reduced."""
        bucket_group = self._own.bucket_groups[group.index]
        if bucket_group.gradient is not None:
            return bucket_group.gradient.shard
        return bucket_group.buckets[0].grad_data.narrow(0, group.shard_start, group.shard.numel())

    def _replace_step(self, hybrid, units: list[HostUnit]) -> None:
        refuse_late_load(hybrid)
        by_optimizer: dict[torch.optim.Optimizer, HostUnit] = {unit.optimizer: unit for unit in units}
        copy_others = partial(self._bring_gradients, hybrid, hybrid._set_sub_optimizer_grads, by_optimizer)
        vars(hybrid)["_set_sub_optimizer_grads"] = copy_others
        if self.delayed is not None:
            vars(hybrid)["step"] = partial(_delayed_step, hybrid, hybrid.step, units, self.delayed)
        if self.early is not None:
            step = partial(_validated_step, hybrid, hybrid.step, units, self._settings[hybrid], self.early)
            vars(hybrid)["step"] = step

    def _bring_gradients(self, hybrid, copy_gradients, units: dict[torch.optim.Optimizer, HostUnit]) -> None:
        """Replaces the host optimizer's function that copies all gradients to memory that it keeps."""
        with without(hybrid, units) as own:
            copy_gradients()
        stepped = [units[one] for one in own]
        left = set(stepped)
        for states in self.states:
            if units.keys() & {unit.optimizer for unit in states.units}:  # others have read ahead for their own steps
                states.expect(unit for unit in states.units if unit in left)
        self._after_norm.expect(stepped)

    def held_bytes(self) -> Counter[str]:
        """Bytes of host memory by kind, without memory that the optimizers list themselves."""
        held = Counter({"staging_slots": sum(states.slots_bytes for states in self.states)})
        held[self.rooms.kind] += self.rooms.bytes
        if self.early is not None:
            held["previous_states"] += self.early.memory.nbytes
        return held

    def close(self) -> None:
        """Call after the parts are closed."""
        for unit in self.units:
            unit.close()
        for states in self.states:
            states.close()
        self.link.close()


def added_up_later(parameters: Iterable[torch.nn.Parameter], names: Iterable[str], ranks: int) -> bool:
    """Whether other ranks' gradients are added to those of ``parameters`` after their reduce.

    Args:
        names: names of the parameters.
        ranks: number of ranks in a tensor-parallel group. These ranks add up gradients of query and key norms, with and
            without --sequence-parallel, although no attribute of these parameters says so.
    """
    marks = ("shared_embedding", "shared", "sequence_parallel", "average_gradients_across_tp_domain")
    marked = any(getattr(parameter, mark, False) for parameter in parameters for mark in marks)
    return marked or (ranks > 1 and any("q_layernorm" in name or "k_layernorm" in name for name in names))


class _Settings:
    """The settings with which Megatron's ``optimizer`` steps in one iteration: learning rate, weight decay and others,
    including the loss scale, which is on the device."""

    def __init__(self, optimizer):
        self.hybrid, self._scaler, self.taken = optimizer.optimizer, optimizer.grad_scaler, []
        self._scale: float | None = None

    def take(self) -> None:
        self.hybrid._sync_hdo_param_groups_to_sub_optimizers()
        self.taken = settings_of(self.hybrid)
        self._scale = None if self._scaler is None else float(self._scaler.inv_scale)

    def inverse_scale(self) -> float | None:
        """The factor by which gradients are unscaled; None if they are not scaled."""
        return self._scale


def _validated_step(hybrid, step, units: list[HostUnit], settings: _Settings, early: EarlySteps, closure=None) -> None:
    """Replaces the host optimizer's ``step``: step units that were not stepped early, or whose step does not stand."""
    done = {unit.optimizer for unit in early.finish(units, changed=settings.taken != settings_of(hybrid))}
    with without(hybrid, done):
        step(closure)
    hybrid._sync_sub_optimizers_state_to_hdo()
    early.ready = True


def _delayed_step(hybrid, step, units: list[HostUnit], delayed: DelayedUpdate, closure=None) -> None:
    """Replaces the host optimizer's ``step`` if updates are delayed."""
    if not delayed.delays:
        step(closure)
        return
    delayed.apply()
    hybrid._sync_hdo_param_groups_to_sub_optimizers()
    delayed.take(units, hybrid._sync_sub_optimizers_state_to_hdo)


def save_from_drive(optimizer, states: DriveStates) -> None:
    """Let Megatron read one parameter's states from the drive when it saves."""
    get: Callable = optimizer._get_main_param_and_optimizer_states

    def read(parameter) -> dict[str, torch.Tensor]:
        group, order = optimizer.model_param_group_index_map[parameter]
        shard = optimizer.optimizer.param_groups[group]["params"][order]
        copy = optimizer.optimizer.gpu_params_map_cpu_copy.get(shard)
        if copy is None or states.unit_of(copy) is None:
            return get(parameter)
        # The step count, and if 0.16 has loaded a checkpoint, a bool that says that this is not padding.
        in_memory = {n: value for n, value in get(parameter).items() if torch.is_tensor(value) and value.dim() == 0}
        return in_memory | states.read_tensors(copy)

    vars(optimizer)["_get_main_param_and_optimizer_states"] = read
