"""Gradients and parameters that pass through slots: the steps of the same optimizers, to the last bit."""

import threading

import pytest
import torch

from megatron_ext.runtime.device import HostDevice
from megatron_ext.runtime.early_steps import EarlySteps
from megatron_ext.runtime.faults import Faults
from megatron_ext.runtime.slot_steps import PassingUnit, SlotUnit, StepSlots

SHAPES = [(3, 5), (7,), (64, 33), (1,), (4096,), (129, 2)]
UNITS = [[0, 1], [2], [3, 4], [5]]
SLOT_BYTES = 1 << 15


class Training:
    """A unit for each list of shapes. ``through``: arguments of its slots, or None for the plain optimizers."""

    def __init__(self, through: dict | None = None, dtype=torch.float32, half=torch.bfloat16, on_host=()):
        generator = torch.Generator().manual_seed(0)
        self.parameters = [torch.randn(shape, generator=generator) for shape in SHAPES]
        self.shards = [parameter.to(half) for parameter in self.parameters]
        self.gradients = [torch.zeros(parameter.numel(), dtype=dtype) for parameter in self.parameters]
        self.optimizers = [torch.optim.AdamW([self.parameters[i] for i in unit], lr=1e-2, fused=True) for unit in UNITS]
        self.slots, self.units = None, []
        for optimizer, unit in zip(self.optimizers, UNITS):
            own = [self.parameters[i] for i in unit]
            gradients = {self.parameters[i]: lambda i=i: self.gradients[i] for i in unit}
            kinds = [frozenset(own if kind in on_host else ()) for kind in ("gradients", "shards")]
            self.units.append(
                PassingUnit(optimizer, gradients, {self.parameters[i]: self.shards[i] for i in unit}, *kinds)
            )
        if through is not None:
            how = {"slots": 2, "slot_bytes": SLOT_BYTES, "cast": "host", "device": HostDevice()} | through
            wide = dtype is torch.float32
            self.slots = StepSlots(self.units, wide=wide, place=torch.device("cpu"), **how)

    def step(self, iteration: int) -> None:
        generator = torch.Generator().manual_seed(100 + iteration)
        for gradient in self.gradients:
            gradient.copy_(torch.randn(gradient.numel(), generator=generator))
        if self.slots is not None:
            self.slots.expect(self.units)
        for number, (optimizer, unit) in enumerate(zip(self.optimizers, UNITS)):
            if self.slots is not None:
                arrived = [later.slot is not None for later in self.units]
                slots = self.slots.number
                assert arrived == [number <= other < number + slots for other in range(len(UNITS))]
            else:
                for i in unit:
                    self.parameters[i].grad = self.gradients[i].float().view(SHAPES[i])
            optimizer.step()
            if self.slots is None:
                for i in unit:
                    self.shards[i].copy_(self.parameters[i])

    def everything(self) -> list[torch.Tensor]:
        states = [value for one in self.optimizers for own in one.state.values() for value in own.values()]
        return [*self.parameters, *self.shards, *states]


@pytest.mark.parametrize("on_host", [(), ("gradients", "shards")], ids=["device", "resting on the host"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("cast", ["host", "device"])
@pytest.mark.parametrize("slots", [2, 3, 7])
def test_steps_are_those_of_the_same_optimizers(slots, cast, dtype, on_host):
    half = torch.bfloat16 if dtype is torch.float32 else dtype
    ours, theirs = Training({"slots": slots, "cast": cast}, dtype, half, on_host), Training(None, dtype, half)
    for iteration in range(3):
        ours.step(iteration)
        theirs.step(iteration)
        assert all(map(torch.equal, ours.everything(), theirs.everything()))
        assert all(parameter.grad is None for parameter in ours.parameters)


def test_memory_is_that_of_the_slots():
    for cast, on_host, on_device in (("host", 3 * SLOT_BYTES * 3 // 2, 0), ("device", 3 * SLOT_BYTES, SLOT_BYTES)):
        ours = Training({"slots": 3, "cast": cast}).slots
        assert ours is not None and (ours.slots_bytes, ours.device_bytes) == (on_host, on_device)
    both = Training({"cast": "device"}, torch.bfloat16).slots
    assert both is not None and both.device_bytes == 2 * SLOT_BYTES  # gradients become fp32 there, too


def test_a_gradient_that_is_not_there_changes_nothing():
    ours = Training({})
    before = [parameter.clone() for parameter in ours.parameters]
    ours.units[1].gradients = dict.fromkeys(ours.units[1].gradients, lambda: None)
    ours.step(0)
    assert torch.equal(ours.parameters[2], before[2]) and not torch.equal(ours.parameters[0], before[0])


def test_gradients_arrive_while_another_unit_is_stepped():
    """As many as there are slots, whose units the end of the iteration waits for."""
    ours, theirs, stepping, go_on = Training({"slots": 3}), Training(), threading.Event(), threading.Event()
    ours.step(0)
    theirs.step(0)
    assert ours.slots is not None
    units = []
    for number, unit in enumerate(UNITS):
        parameters = [ours.parameters[i] for i in unit]
        gradients, shards = ({ours.parameters[i]: of[i] for i in unit} for of in (ours.gradients, ours.shards))
        units.append(SlotUnit(number, ours.slots, number, gradients, shards, lambda: None))
        assert [ours.slots.unit_of(parameter) for parameter in parameters] == [number] * len(unit)

    def published() -> None:
        stepping.set()
        assert go_on.wait(10)

    early = EarlySteps(units, 1 << 20, lambda: None, published, HostDevice(), Faults(), rank=0)
    early.ready = True
    early.begin()
    for number in range(len(units)):
        early.reduced(number)
    assert stepping.wait(10)
    while ours.units[2].slot is None:
        stepping.wait(0.01)
    early.end()
    assert [unit.slot is not None for unit in ours.units] == [True, True, True, False]
    go_on.set()
    assert early.settle(units, changed=False) == units[:3]
    early.close()
    for optimizer, unit in list(zip(theirs.optimizers, UNITS))[:3]:
        for i in unit:
            theirs.parameters[i].grad = theirs.gradients[i].view(SHAPES[i])
        optimizer.step()
        for i in unit:
            theirs.shards[i].copy_(theirs.parameters[i])
    assert all(map(torch.equal, ours.everything(), theirs.everything()))
