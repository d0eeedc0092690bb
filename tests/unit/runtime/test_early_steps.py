"""Steps of the host's optimizer during the backward: what stands, what is taken back, and what waits."""

import threading
import time
from types import SimpleNamespace

import faults
import pytest
import torch
from made_and_closed import made_and_closed

from megatron_ext.runtime.device import HostDevice
from megatron_ext.runtime.host_device import HostEvent
from megatron_ext.runtime.host_step.early import EarlySteps, EarlyUnit
from megatron_ext.runtime.host_step.flat_adamw import FlatAdamW, lay_out_parameters
from megatron_ext.runtime.host_step.room import OwnRooms, StepStreams
from megatron_ext.runtime.host_step.unit import HostUnit, Piece
from megatron_ext.runtime.issuer import Issuer
from megatron_ext.runtime.page_locked import large_tensor
from megatron_ext.runtime.recorder import NOTHING, Recorder
from megatron_ext.runtime.worker import Transfer

SHAPES = [(7, 5), (33,)]


class Training:
    """A unit a shape, each with a device's tensor; its optimizer has stepped once."""

    def __init__(
        self,
        rollback_bytes: int = 1 << 16,
        scale: float | None = None,
        published=None,
        copied: HostEvent | None = None,
        recorder=NOTHING,
        on_host=False,
    ):
        generator = torch.Generator().manual_seed(1)
        self.parameters = [torch.randn(shape, generator=generator) for shape in SHAPES]
        self.gradients = [torch.randn(shape, generator=generator) for shape in SHAPES]
        self.shards = [parameter.bfloat16() for parameter in self.parameters]
        self.units, self.issuer, device = [], Issuer(), HostDevice()
        self.link = StepStreams(device, device.device, recorder=recorder)
        rooms, early = OwnRooms(self.link), []
        for index, (parameter, gradient, shard) in enumerate(zip(self.parameters, self.gradients, self.shards)):
            optimizer = FlatAdamW([parameter], lr=1e-2, fused=True)
            parameter.grad = gradient.clone()
            optimizer.step()
            lay_out_parameters(optimizer, large_tensor)
            shard.copy_(parameter)
            piece = Piece(parameter, lambda gradient=gradient: gradient, shard, gradient_on_host=on_host)
            self.units.append(HostUnit(index, optimizer, [piece], rooms))
            rooms.make(self.units[-1])
            inverse = None if scale is None else 1 / scale
            early.append(EarlyUnit(self.units[-1], [gradient], lambda inverse=inverse: inverse))
        if published is not None:
            published = SimpleNamespace(wait_on_thread=published, copied=copied)
        self.early = EarlySteps(early, rollback_bytes, lambda: None, published, self.link, self.issuer)
        self.early.ready = True

    def everything(self) -> list[torch.Tensor]:
        states = [value for unit in self.units for own in unit.optimizer.state.values() for value in own.values()]
        return [tensor.clone() for tensor in (*self.parameters, *self.shards, *states)]

    def backward(self) -> None:
        self.early.begin()
        for index in range(len(self.units)):
            self.early.reduced(index)
        self.early.wait()
        self.early.end()
        self.link.left.synchronize()

    def close(self) -> None:
        self.early.close()
        self.link.close()


def same(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    return all(map(torch.equal, ours, theirs))


@pytest.fixture
def training():
    yield from made_and_closed(Training)


def test_one_thread_waits_for_a_reduce(training):
    """gloo's handles write each time they are waited for, and Megatron waits for them, too."""
    ours, waited = training(), []
    handle = SimpleNamespace(wait=lambda: waited.append(threading.current_thread().name.rpartition("ext-")[2]))
    ours.early.begin()
    for index in range(len(ours.units)):
        ours.early.reduced(index, handle=handle)
    ours.early.wait()
    ours.early.end()
    assert waited == ["gradients-arrive"] * len(ours.units) and ours.early.taken == len(ours.units)


def test_steps_on_gradients_that_stay_stand(training):
    recorder = Recorder(rank=0)
    ours, theirs = training(recorder=recorder), training()
    ours.backward()
    assert ours.early.finish(ours.units, changed=False) == ours.units
    for unit, gradient, parameter, shard in zip(theirs.units, theirs.gradients, theirs.parameters, theirs.shards):
        unit.close()  # the optimizer steps by itself
        parameter.grad = gradient.clone()
        unit.optimizer.step()
        shard.copy_(parameter)
    assert same(ours.everything(), theirs.everything())
    assert (ours.early.taken, ours.early.taken_back) == (2, 0)
    assert [row[:2] for row in recorder.rows if row[0] == "host_step"] == [("host_step", "0"), ("host_step", "1")]


def test_the_smallest_clipping_of_one_gradient_takes_its_step_back_alone(training):
    ours = training()
    before = ours.everything()
    ours.backward()
    ours.gradients[1].mul_(float(torch.nextafter(torch.tensor(1.0), torch.tensor(0.0))))
    assert ours.early.finish(ours.units, changed=False) == ours.units[:1]
    after = ours.everything()
    assert torch.equal(after[1], before[1]) and not torch.equal(after[0], before[0])
    assert same(after[7:], before[7:]) and not same(after[4:7], before[4:7])
    assert (ours.early.taken, ours.early.taken_back) == (2, 1)


def test_iterations_that_are_clipped_again_and_again_are_left_out_more_and_more(training):
    ours, taken = training(), []
    for clipped in [True] * 40 + [False] * 20:
        before = ours.early.taken
        ours.backward()
        taken.append(ours.early.taken > before)
        for gradient in ours.gradients if clipped else ():
            gradient.mul_(0.75)
        ours.early.finish(ours.units, changed=False)
    assert [index for index, early in enumerate(taken) if early] == [0, 2, 5, 10, 19, 36, *range(53, 60)]


def test_one_gradient_of_zeros_does_not_hide_that_the_others_are_clipped(training):
    ours = training()
    ours.gradients[0].zero_()
    for factor, taken in ((0.5, 2), (1, 4), (0.5, 6)):
        ours.backward()
        ours.gradients[1].mul_(factor)
        ours.early.finish(ours.units, changed=False)
        assert ours.early.taken == taken  # half of them stand


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e-40], ids=["nan", "inf", "subnormal"])
def test_what_no_element_can_tell_does_not_stand(training, value):
    """Of infinities, and of numbers that clipping rounds, the product may be the number itself; of 0 it always is."""
    ours = training()
    ours.gradients[0].zero_()
    ours.gradients[0].view(-1)[3] = value
    before = ours.everything()
    ours.backward()
    assert ours.early.finish(ours.units, changed=False) == ours.units[1:]
    assert torch.equal(ours.everything()[0], before[0])


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0, 1e-40])
def test_one_normal_element_tells_of_all(training, value):
    """Also where it lies behind many that are not."""
    for clipped in (False, True):
        ours = training()
        ours.gradients[0].fill_(value)
        ours.gradients[0].view(-1)[-1] = 0.25
        ours.backward()
        ours.gradients[0].mul_(0.5 if clipped else 1)
        assert ours.early.finish(ours.units, changed=False) == ours.units[clipped:]


def test_gradients_that_are_zero_stand(training):
    ours = training()
    ours.gradients[0].zero_()
    ours.backward()
    ours.gradients[0].mul_(0.5)
    assert ours.early.finish(ours.units, changed=False) == ours.units


def test_another_learning_rate_takes_every_step_back(training):
    ours = training()
    before = ours.everything()
    ours.backward()
    assert ours.early.finish(ours.units, changed=True) == []
    after = ours.everything()
    assert same(after[:2] + after[4:], before[:2] + before[4:])  # the steps that follow write the device's tensors


def test_gradients_are_unscaled_as_the_optimizer_does_it(training):
    ours, theirs = training(scale=2.0**12), training()
    for gradient in ours.gradients:
        gradient.mul_(2.0**12)
    ours.backward()
    theirs.backward()
    for gradient in ours.gradients:  # what Megatron does before it steps
        gradient.mul_(2.0**-12)
    assert ours.early.finish(ours.units, changed=False) == ours.units
    theirs.early.finish(theirs.units, changed=False)
    assert same(ours.everything(), theirs.everything())


def test_a_step_that_is_skipped_leaves_nothing(training):
    ours = training()
    before = ours.everything()
    ours.backward()
    assert not same(ours.everything(), before)
    ours.early.skipped()
    assert same(ours.everything(), before)
    ours.backward()  # makes no early steps, because the last ones failed
    ours.backward()  # and another iteration that no step follows
    ours.early.begin()
    assert same(ours.everything(), before) and ours.early.taken_back == 4


@faults.injected(no_rollback=1)
def test_the_control_lets_everything_stand(training):
    ours = training()
    before = ours.everything()
    ours.backward()
    ours.gradients[0].mul_(0.5)
    assert ours.early.finish(ours.units, changed=False) == ours.units
    assert not torch.equal(ours.everything()[0], before[0])


def test_what_finds_no_room_and_what_comes_late_waits(training):
    sizes = [unit.rollback_bytes() for unit in training().units]
    little = training(rollback_bytes=sizes[0])
    little.backward()
    assert little.early.finish(little.units, changed=False) == little.units[:1]
    late = training()
    late.early.begin()
    late.early.reduced(1)
    late.early.wait()
    late.early.end()
    late.early.reduced(0)
    assert late.early.finish(late.units, changed=False) == late.units[1:]
    first = training()
    first.early.ready = False  # before the optimizer's first step, and after somebody has changed parameters
    first.backward()
    assert first.early.finish(first.units, changed=False) == []


def test_shards_are_not_written_before_they_are_published(training):
    """Nobody may have read the host copy in this iteration, so that nothing else is behind it."""
    event, copied = HostEvent(), Transfer()
    event.mark = copied
    ours = training(published=lambda: None, copied=event)
    before = ours.everything()
    ours.early.begin()
    for index in range(len(ours.units)):
        ours.early.reduced(index)
    ours.early.wait()
    ours.early.end()
    time.sleep(0.05)
    assert same(ours.shards, before[2:4])
    copied.finish()
    ours.link.left.synchronize()
    assert not any(map(torch.equal, ours.shards, before[2:4]))


def test_parameters_that_are_being_published_are_not_changed(training):
    waits, read = threading.Event(), threading.Event()

    def published() -> None:
        waits.set()
        assert read.wait(10)

    ours = training(published=published)
    before = ours.everything()
    ours.early.begin()
    ours.early.reduced(0)
    assert waits.wait(10)
    ours.early.end()  # waits for gradients that are being copied, not for steps
    assert same(ours.everything(), before)
    read.set()
    assert ours.early.finish(ours.units, changed=False) == ours.units[:1]


def test_a_gradient_in_host_memory_is_stepped_on_when_all_of_it_is_there(training):
    ours, added = training(on_host=True), Transfer()
    before = ours.everything()
    ours.early.begin()
    ours.early.reduced(0, added)
    ours.early.reduced(1, added)
    assert same(ours.everything(), before)
    for gradient in ours.gradients:
        gradient.add_(1)
    added.finish()
    ours.early.wait()
    ours.early.end()
    for gradient in ours.gradients:
        assert gradient.any()
    assert ours.early.finish(ours.units, changed=False) == ours.units
    theirs = training()
    for gradient in theirs.gradients:
        gradient.add_(1)
    theirs.backward()
    assert same(ours.everything(), theirs.everything())


def test_a_gradient_in_host_memory_that_comes_after_the_backward_is_not_stepped_on(training):
    """It may be clipped by then."""
    ours, added = training(on_host=True), Transfer()
    before = ours.everything()
    ours.early.begin()
    ours.early.reduced(0, added)
    ours.early.end()
    added.finish()
    assert ours.early.finish(ours.units, changed=False) == [] and ours.early.taken == 0
    assert same(ours.everything(), before)


def test_an_error_of_the_thread_reaches_the_training_thread():
    def broken() -> None:
        raise OSError("no space")

    ours = Training(published=broken)
    ours.early.begin()
    ours.early.reduced(0)
    with pytest.raises(OSError, match="no space"):
        ours.early.wait()
    ours.link.close()
