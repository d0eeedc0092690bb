"""Gradients and parameters that pass through rooms: the steps of the same optimizers, to the last bit."""

import threading
from types import SimpleNamespace

import pytest
import torch

from megatron_ext.runtime.device import HostDevice
from megatron_ext.runtime.host_step.after_norm import AfterNorm
from megatron_ext.runtime.host_step.early import EarlySteps, EarlyUnit
from megatron_ext.runtime.host_step.flat_adamw import FlatAdamW, lay_out_parameters
from megatron_ext.runtime.host_step.room import OwnRooms, Room, SharedRooms, StepStreams
from megatron_ext.runtime.host_step.unit import HostUnit, Piece
from megatron_ext.runtime.issuer import Issuer
from megatron_ext.runtime.page_locked import large_tensor
from megatron_ext.workload.state_layout import LINE_BYTES

SHAPES = [(3, 5), (7,), (64, 33), (1,), (4096,), (129, 2)]
UNITS = [[0, 1], [2], [3, 4], [5]]
ROOM_BYTES, PART_BYTES = 1 << 15, 1 << 12  # a parameter that the device rounds passes in parts


class Plain:
    """Parameters, an optimizer for each unit of them, and 16-bit shards that a step writes."""

    kind = torch.optim.AdamW

    def __init__(self, dtype=torch.float32, half=torch.bfloat16):
        generator = torch.Generator().manual_seed(0)
        self.parameters = [torch.randn(shape, generator=generator) for shape in SHAPES]
        self.shards = [parameter.to(half) for parameter in self.parameters]
        self.gradients = [torch.zeros(parameter.numel(), dtype=dtype) for parameter in self.parameters]
        self.optimizers = [self.kind([self.parameters[i] for i in unit], lr=1e-2, fused=True) for unit in UNITS]

    def draw(self, iteration: int) -> None:
        generator = torch.Generator().manual_seed(100 + iteration)
        for gradient in self.gradients:
            gradient.copy_(torch.randn(gradient.numel(), generator=generator))

    def step(self, iteration: int) -> None:
        self.draw(iteration)
        self.step_units(range(len(UNITS)))

    def step_units(self, numbers) -> None:
        for number in numbers:
            for i in UNITS[number]:
                self.parameters[i].grad = self.gradients[i].float().view(SHAPES[i])
            self.optimizers[number].step()
            for i in UNITS[number]:
                self.shards[i].copy_(self.parameters[i])

    def everything(self) -> list[torch.Tensor]:
        states = [value for one in self.optimizers for own in one.state.values() for value in own.values()]
        return [*self.parameters, *self.shards, *states]


class Training(Plain):
    """The same through rooms: ``rooms`` shared ones, or 0: one for each unit. What lies behind each other is stepped as
    one tensor."""

    kind = FlatAdamW

    def __init__(self, rooms=2, cast="host", dtype=torch.float32, half=torch.bfloat16, on_host=False):
        super().__init__(dtype, half)
        for optimizer in self.optimizers:
            lay_out_parameters(optimizer, large_tensor)
        self.issuer, device, casts = Issuer(), HostDevice(), cast == "device"
        inward, outward = PART_BYTES * casts, ROOM_BYTES * (casts and dtype is not torch.float32)
        self.link = StepStreams(device, device.device, inward, outward)
        self.rooms = SharedRooms(self.link, rooms, ROOM_BYTES, casts) if rooms else OwnRooms(self.link)
        self.units = []
        for number, unit in enumerate(UNITS):
            pieces = [self.piece(i, on_host) for i in unit]
            self.units.append(HostUnit(number, self.optimizers[number], pieces, self.rooms, LINE_BYTES))
            if isinstance(self.rooms, OwnRooms):
                self.rooms.make(self.units[-1])
        self.after_norm = AfterNorm(self.link)

    def piece(self, i: int, on_host: bool) -> Piece:
        return Piece(self.parameters[i], lambda: self.gradients[i], self.shards[i], on_host, on_host)

    def step_units(self, numbers) -> None:
        units = [self.units[number] for number in numbers]
        self.after_norm.expect(units)
        for unit in units:
            unit.optimizer.step()

    def close(self) -> None:
        for unit in self.units:
            unit.close()
        self.link.close()


@pytest.fixture
def training():
    made = []

    def make(*args, **how) -> Training:
        made.append(Training(*args, **how))
        return made[-1]

    yield make
    for one in made:
        one.close()


def assert_same(ours: Plain, theirs: Plain) -> None:
    assert all(map(torch.equal, ours.everything(), theirs.everything()))


@pytest.mark.parametrize("on_host", [False, True], ids=["device", "resting on the host"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("cast", ["host", "device"])
@pytest.mark.parametrize("rooms", [2, 3, 7])
def test_steps_are_those_of_the_same_optimizers(training, rooms, cast, dtype, on_host):
    half = torch.bfloat16 if dtype is torch.float32 else dtype
    ours, theirs = training(rooms, cast, dtype, half, on_host), Plain(dtype, half)
    for iteration in range(3):
        ours.step(iteration)
        theirs.step(iteration)
        assert_same(ours, theirs)
        assert all(parameter.grad is None for parameter in ours.parameters)


def test_a_room_for_each_unit_gives_the_same_steps_too(training):
    ours, theirs = training(rooms=0), Plain()
    for iteration in range(3):
        ours.step(iteration)
        theirs.step(iteration)
        assert_same(ours, theirs)
    assert ours.rooms.bytes == sum(unit.bytes for unit in ours.units)


@pytest.mark.parametrize("rooms", [2, 3, 7])
def test_gradients_of_the_next_units_arrive_before_one_is_stepped(training, rooms):
    ours, seen = training(rooms), []
    for number, optimizer in enumerate(ours.optimizers):
        optimizer.register_step_pre_hook(
            lambda *_, number=number: seen.append((number, [unit.room is not None for unit in ours.units]))
        )
    ours.step(0)
    assert seen == [(n, [n <= other < n + rooms for other in range(len(UNITS))]) for n in range(len(UNITS))]


def test_memory_is_that_of_the_rooms(training):
    for cast, on_host, on_device in (
        ("host", 3 * ROOM_BYTES * 3 // 2, 0),
        ("device", 3 * ROOM_BYTES, PART_BYTES * 3 // 2),
    ):
        ours = training(3, cast)
        assert (ours.rooms.bytes, ours.link.device_bytes) == (on_host, on_device)
    both = training(3, "device", torch.bfloat16)
    assert both.link.device_bytes == PART_BYTES * 3 // 2 + ROOM_BYTES  # gradients become fp32 there, too


def test_a_gradient_that_is_not_there_changes_nothing(training):
    ours, before = training(), Plain().parameters
    ours.units[1].pieces[0] = ours.units[1].pieces[0]._replace(gradient=lambda: None)
    ours.step(0)
    assert torch.equal(ours.parameters[2], before[2]) and not torch.equal(ours.parameters[0], before[0])


def test_a_unit_whose_gradients_nobody_has_brought_is_not_stepped(training):
    ours = training()
    with pytest.raises(AssertionError, match="stepped before its gradients were brought"):
        ours.optimizers[0].step()


@pytest.mark.parametrize(("halves", "dtype"), [(False, torch.float32), (True, torch.float32), (True, torch.bfloat16)])
def test_a_room_that_parameters_leave_from_is_not_overwritten(training, halves, dtype):
    """Neither by the gradients of the next unit nor by its parameters."""
    ours, theirs, go_on = training(dtype=dtype), Plain(dtype), threading.Event()
    ours.draw(0)
    theirs.step(0)
    unit, numbers = ours.units[2], UNITS[2]
    sizes = [unit.bytes, *([unit.bytes // 2] if halves else [])]
    held = [torch.zeros(size, dtype=torch.uint8) for size in sizes]
    room, gradients = Room(ours.link, *held), [ours.gradients[i] for i in numbers]
    room.arrive(unit, gradients, [])
    room.wait()
    room.begin(unit, gradients, in_place=True)
    for i in numbers:
        ours.parameters[i].copy_(theirs.parameters[i])
    room.end(unit)
    ours.link.leaving.run(lambda: go_on.wait(10))
    room.leave(unit)
    before = [memory.clone() for memory in held]
    more = [gradient + 1 for gradient in gradients]
    room.arrive(unit, more, [])

    def step() -> None:
        room.wait()
        room.begin(unit, more, in_place=True)
        room.end(unit)

    ends = threading.Thread(target=step)
    ends.start()
    ends.join(0.1)
    assert ends.is_alive() and all(map(torch.equal, held, before))
    go_on.set()
    ends.join(100)
    assert not ends.is_alive() and all(torch.equal(ours.shards[i], theirs.shards[i]) for i in numbers)


class Beside(Training):
    """Units that may be stepped during the backward."""

    def __init__(self, *args, published=lambda: None, **how):
        super().__init__(*args, **how)
        self.step(0)
        early = [
            EarlyUnit(unit, [self.gradients[i] for i in own], lambda: None) for unit, own in zip(self.units, UNITS)
        ]
        publisher = SimpleNamespace(wait_on_thread=published, copied=None)
        how = dict(issuer=self.issuer)
        self.early = EarlySteps(early, 1 << 20, lambda: None, publisher, self.link, **how)
        self.early.ready = True

    def finish(self) -> list[int]:
        """The optimizer's step; the units whose early step stands."""
        standing = self.early.finish(self.units, changed=False)
        self.step_units([unit.group for unit in self.units if unit not in standing])
        return [unit.group for unit in standing]


def test_gradients_arrive_while_another_unit_is_stepped():
    """As many as there are rooms, whose units the end of the iteration waits for."""
    stepping, go_on = threading.Event(), threading.Event()

    def published() -> None:
        stepping.set()
        assert go_on.wait(10)

    ours, theirs = Beside(3, published=published), Plain()
    theirs.step(0)
    ours.draw(1)
    ours.early.begin()
    for number in range(len(UNITS)):
        ours.early.reduced(number)
    assert stepping.wait(10)
    ours.early.end()
    assert [unit.room is not None for unit in ours.units] == [True, True, True, False]
    go_on.set()
    assert ours.finish() == [0, 1, 2]
    theirs.step(1)
    assert_same(ours, theirs)
    ours.early.close()
    ours.close()


@pytest.mark.parametrize("on_host", [False, True])
@pytest.mark.parametrize("cast", ["host", "device"])
@pytest.mark.parametrize("rooms", [0, 2, 3])
def test_units_that_are_stepped_early_and_units_that_wait_share_rooms(rooms, cast, on_host):
    """Some steps stand, some are taken back, some come behind the norm: training is the same."""
    ours, theirs = Beside(rooms, cast, on_host=on_host), Plain()
    theirs.step(0)
    for iteration, (order, clipped) in enumerate(
        (([0, 1, 2, 3], []), ([3, 1], [3]), ([2], []), ([1, 0, 2], [0, 1])), 1
    ):
        ours.draw(iteration)
        theirs.draw(iteration)
        ours.early.begin()
        for number in order:
            ours.early.reduced(number)
            ours.early.wait()
        ours.early.end()
        for one in (ours, theirs):
            for number in clipped:
                for i in UNITS[number]:
                    one.gradients[i].mul_(0.5)
        assert ours.finish() == [number for number in sorted(order) if number not in clipped]
        theirs.step_units(range(len(UNITS)))
        assert_same(ours, theirs)
    ours.early.close()
    ours.close()
