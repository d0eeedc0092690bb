"""A host optimizer whose states rest on a drive: the same steps, to the last bit, through a fixed number of slots."""

import gc
import os
from functools import partial

import drive_faults
import pytest
import torch
from drive_faults import FAULTS

from megatron_ext.formats.errors import InputError
from megatron_ext.runtime.device import HostDevice
from megatron_ext.runtime.drive import DriveError
from megatron_ext.runtime.host_step.after_norm import AfterNorm
from megatron_ext.runtime.host_step.drive_states import DriveStates, DriveUnit
from megatron_ext.runtime.host_step.flat_adamw import MOMENTS, FlatAdamW
from megatron_ext.runtime.host_step.room import OwnRooms, StepStreams
from megatron_ext.runtime.host_step.unit import HostUnit, Piece
from megatron_ext.runtime.issuer import Issuer
from megatron_ext.workload.drive_reads import DriveReads
from megatron_ext.workload.state_layout import gradient_slot_bytes, region_bytes

SHAPES = [(3, 5), (7,), (64, 33), (1,), (4096,), (129, 2)]
UNITS = [[0, 1], [2], [3, 4], [5]]


def parameters(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def optimizers_of(params: list[torch.Tensor], units, kind=FlatAdamW) -> list:
    return [kind([{"params": [params[i] for i in unit], "weight_decay": 0.1}], lr=1e-2, fused=True) for unit in units]


@pytest.fixture
def links():
    """Streams by name, which end with the test."""
    made = []

    def make() -> StepStreams:
        made.append(StepStreams(HostDevice(), torch.device("cpu")))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture
def store(links):
    """``store(optimizers, directory, ...)``: states of parameters whose gradients are there when they are stepped."""

    def make(optimizers, directory, slots=3, **settings) -> DriveStates:
        how = dict(settings=DriveReads(**settings), link=(link := links()), issuer=Issuer(), rooms=OwnRooms(link))
        states = DriveStates(directory, slots=slots, **how)
        for optimizer in optimizers:
            own = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            pieces = [Piece(p, lambda p=p: p.grad, torch.zeros(p.shape).half()) for p in own]
            optimizer.register_step_pre_hook(partial(bring, states.units, len(states.units)))
            states.units.append(DriveUnit(states, 0, optimizer, pieces))
            states.rooms.make(states.units[-1])
            states.units[-1].stepped = HostUnit.give_up
        states.open()
        return states

    return make


def bring(units: list[DriveUnit], number: int, *_) -> None:
    """Before the unit's own hook: its gradients arrive."""
    units[number].arrive([])


def step(params: list[torch.Tensor], optimizers, iteration: int) -> None:
    for parameter, gradient in zip(params, parameters(100 + iteration)):
        parameter.grad = gradient
    for optimizer in optimizers:
        optimizer.param_groups[0]["lr"] = 1e-2 / (1 + iteration)
        optimizer.step()


def everything(states: DriveStates, params) -> list[dict[str, torch.Tensor]]:
    return [states.read_tensors(parameter) for parameter in params]


def in_memory(params, optimizers) -> list[dict[str, torch.Tensor]]:
    found = {}
    for optimizer in optimizers:
        for parameter, state in optimizer.state.items():
            found[parameter] = {"param": parameter, **{n: t for n, t in state.items() if n != "step"}}
    return [found[parameter] for parameter in params]


def stepped(store, folder):
    """Parameters, their states on the drive, and a copy of both, after one step."""
    ours = parameters(0)
    states = store(optimizers_of(ours, UNITS), folder)
    step(ours, [unit.optimizer for unit in states.units], 0)
    return ours, states, [{name: value.clone() for name, value in own.items()} for own in everything(states, ours)]


def assert_equal(ours, theirs) -> None:
    for own, other in zip(ours, theirs, strict=True):
        assert own.keys() == other.keys()
        for name in own:
            assert torch.equal(own[name], other[name]), name


@pytest.mark.parametrize("slots", [2, 3, 7])
@pytest.mark.parametrize("units", [UNITS, [[0, 1, 2, 3, 4, 5]]], ids=["four units", "one unit"])
def test_steps_are_those_of_the_same_optimizer_in_memory(store, tmp_path, units, slots):
    ours, theirs = parameters(0), parameters(0)
    own, other = optimizers_of(ours, units), optimizers_of(theirs, units, torch.optim.AdamW)
    states = store(own, tmp_path, slots, block_bytes=4096, queue_depth=2)
    for iteration in range(5):
        step(ours, own, iteration)
        step(theirs, other, iteration)
        assert all(parameter.isnan().all() for parameter in ours)  # nothing of them is in memory
        assert_equal(everything(states, ours), in_memory(theirs, other))
    states.close()


def test_states_that_exist_already_go_to_the_drive(store, tmp_path):
    ours, theirs = parameters(0), parameters(0)
    own, other = optimizers_of(ours, UNITS), optimizers_of(theirs, UNITS, torch.optim.AdamW)
    for iteration in range(2):
        step(ours, own, iteration)
        step(theirs, other, iteration)
    states = store(own, tmp_path)
    assert_equal(everything(states, ours), in_memory(theirs, other))
    step(ours, own, 2)
    step(theirs, other, 2)
    assert_equal(everything(states, ours), in_memory(theirs, other))
    states.close()


def test_what_a_checkpoint_takes_is_mapped_from_the_drive_alone(store, tmp_path):
    """Each tensor with a storage of its own; changing one changes nothing on the drive."""
    ours, states, first = stepped(store, tmp_path)
    for tensors in everything(states, ours):
        for tensor in tensors.values():
            assert tensor.untyped_storage().nbytes() == tensor.numel() * 4
            tensor.zero_()
    assert_equal(everything(states, ours), first)
    os.ftruncate(states.file.descriptor, 4096)
    with pytest.raises(DriveError, match=r"states of a checkpoint: the file of process .* ends at byte"):
        everything(states, ours)


def test_memory_is_that_of_the_slots(store, tmp_path):
    ours = parameters(0)
    states = store(optimizers_of(ours, UNITS), tmp_path, slots=2)
    sizes = [sum(region_bytes(ours[i].numel(), 2) for i in unit) for unit in UNITS]
    assert [unit.regions.bytes for unit in states.units] == sizes
    assert states.slots_bytes == 2 * max(sizes) and states.bytes == sum(sizes)
    step(ours, [unit.optimizer for unit in states.units], 0)
    held = [*ours, *(t for unit in states.units for s in unit.optimizer.state.values() for t in s.values() if t.dim())]
    assert all(tensor.untyped_storage().nbytes() == 4 for tensor in held)
    states.close()


def test_states_can_be_saved_after_training_and_go_with_their_optimizer(store, tmp_path):
    """Megatron saves a last checkpoint when training has ended. The slots are gone by then."""
    ours, states, last = stepped(store, tmp_path)
    opened = lambda: sum(str(tmp_path) in os.readlink(file.path) for file in os.scandir("/proc/self/fd"))
    assert opened() > 1
    states.close()
    assert_equal(everything(states, ours), last)
    assert opened() == 1
    del states
    gc.collect()
    assert opened() == 0


def test_a_file_that_is_cut_off_ends_the_step_with_its_name(store, tmp_path):
    ours = parameters(0)
    own = optimizers_of(ours, UNITS)
    states = store(own, tmp_path, slots=2)
    step(ours, own, 0)
    everything(states, ours)  # all writes have ended
    os.ftruncate(states.file.descriptor, 4096)
    with pytest.raises(DriveError, match=rf"states [0-9]: the file of process .* in {tmp_path} ends at byte"):
        for iteration in (1, 2):
            step(ours, own, iteration)


@pytest.mark.parametrize("fault", [fault for fault in FAULTS if fault != "killed"])
def test_a_fault_of_the_drive_ends_the_step_and_no_state_is_used_after_it(store, tmp_path, monkeypatch, fault):
    ours = parameters(0)
    own = optimizers_of(ours, UNITS)
    states = store(own, tmp_path, slots=3, block_bytes=4096)
    step(ours, own, 0)
    everything(states, ours)
    drive_faults.install(fault, 5, monkeypatch.setattr)
    with pytest.raises(DriveError, match=rf"states [0-9]: the file of process .* in {tmp_path} {FAULTS[fault][-1]}"):
        for iteration in (1, 2):
            step(ours, own, iteration)
    assert all(parameter.isnan().all() for parameter in ours)
    with pytest.raises((DriveError, AssertionError)):  # nor later
        for iteration in (1, 2):
            step(ours, own, iteration)


def test_requests_that_move_a_part_go_on_with_the_rest(store, tmp_path, monkeypatch):
    parts = [0, 0]
    for write in (False, True):

        def part(index, count, write=write):
            parts[write] += count > 4096
            return min(count, 4096)

        drive_faults.replace_results(part, write, monkeypatch.setattr)
    ours, theirs = parameters(0), parameters(0)
    own, other = optimizers_of(ours, UNITS), optimizers_of(theirs, UNITS, torch.optim.AdamW)
    states = store(own, tmp_path)
    for iteration in range(3):
        step(ours, own, iteration)
        step(theirs, other, iteration)
    assert_equal(everything(states, ours), in_memory(theirs, other))
    assert min(parts) > 10
    states.close()


def test_a_directory_that_is_missing_is_refused(store, tmp_path):
    with pytest.raises(InputError, match="is not a directory"):
        store(optimizers_of(parameters(0), UNITS), tmp_path / "nowhere")


@pytest.mark.parametrize("slots", [2, 3, 7])
def test_initial_values_and_gradients_come_when_they_are_needed(links, tmp_path, slots):
    """Parameters without memory, 16-bit gradients by rooms, others used where they are: the steps are the same, and so
    are the 16-bit parameters on the device and on the host."""
    given, theirs = parameters(0), parameters(0)
    ours = [torch.full((), torch.nan).expand(parameter.shape) for parameter in given]
    own, other = optimizers_of(ours, UNITS), optimizers_of(theirs, UNITS, torch.optim.AdamW)
    shards, gradients, on_host = [parameter.bfloat16() for parameter in given], {}, [0, 2, 4]
    link = (
        links() if slots == 2 else StepStreams(HostDevice(), torch.device("cpu"), 0, 4 * max(p.numel() for p in given))
    )
    issuer, settings = Issuer(), DriveReads(block_bytes=4096)
    states = DriveStates(tmp_path, slots=slots, settings=settings, link=link, issuer=issuer)
    for unit, optimizer in zip(UNITS, own):
        pieces = [Piece(ours[i], lambda i=i: gradients[i], shards[i], i in on_host, i in on_host) for i in unit]
        states.units.append(DriveUnit(states, 0, optimizer, pieces))
    states.open(dict(zip(ours, given)))
    after_norm = AfterNorm(link)
    at_first = [{"param": parameter} | dict.fromkeys(MOMENTS, torch.zeros_like(parameter)) for parameter in theirs]
    assert_equal(everything(states, ours), at_first)
    for iteration in range(4):
        for i, (their, gradient) in enumerate(zip(theirs, parameters(100 + iteration))):
            gradients[i] = gradient if i in on_host or slots == 2 else gradient.bfloat16()
            their.grad = gradients[i].float()
        if iteration == 2:
            gradients[1] = theirs[1].grad = None
        states.expect(states.units)
        after_norm.expect([*states.units])
        for mine, their in zip(own, other):
            mine.step()
            their.step()
        assert all(parameter.isnan().all() and parameter.grad is None for parameter in ours)
        assert_equal(everything(states, ours), in_memory(theirs, other))
        assert all(torch.equal(shard, their.bfloat16()) for shard, their in zip(shards, theirs))
    states.close()
    link.close()


def test_there_is_a_room_beside_each_slot_where_gradients_need_one(links, tmp_path):
    for room in (False, True):
        ours, link = parameters(0), links()
        how = dict(settings=DriveReads(), link=link, issuer=Issuer(), rooms=None if room else OwnRooms(link))
        states = DriveStates(tmp_path, slots=3, **how)
        (optimizer,) = optimizers_of(ours, [[0, 1, 2, 3, 4, 5]])
        pieces = [Piece(parameter, lambda: None, parameter.bfloat16()) for parameter in ours]
        states.units.append(DriveUnit(states, 0, optimizer, pieces))
        states.open()
        piece = states.units[0].regions.bytes
        assert states.slots_bytes == 3 * (piece + (gradient_slot_bytes(piece, 2) if room else 0))
        states.close()
