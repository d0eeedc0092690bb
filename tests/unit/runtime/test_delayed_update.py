"""Delayed updates on their thread: what is made when, and what is applied."""

import threading
from types import SimpleNamespace

import faults
import pytest
import torch
from made_and_closed import made_and_closed

from megatron_ext.runtime.device import HostDevice
from megatron_ext.runtime.group import ScheduleError
from megatron_ext.runtime.host_step.delayed import DelayedUpdate
from megatron_ext.runtime.host_step.room import OwnRooms, StepStreams
from megatron_ext.runtime.host_step.unit import HostUnit, Piece
from megatron_ext.runtime.issuer import Issuer
from megatron_ext.runtime.recorder import NOTHING, Recorder


class Copies(torch.optim.Optimizer):
    """Its step sets every parameter to its gradient."""

    whole = ()

    def __init__(self, parameters):
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            parameter.copy_(parameter.grad)


class Training:
    """A delayed update of one unit: two parameters, whose shards rest on the device and in host memory, and whose step
    sets them to their gradients."""

    def __init__(self, begun=0, after=0, published=None, recorder=NOTHING, device=HostDevice()):  # noqa: B008
        publisher = None if published is None else SimpleNamespace(wait_on_thread=published)
        self.link, self.issuer = StepStreams(device, device.device, recorder=recorder), Issuer()
        self.gradients = [torch.zeros(3), torch.zeros(3)]
        self.shards = [torch.zeros(3, dtype=torch.bfloat16) for _ in range(2)]
        parameters = [torch.zeros(3), torch.zeros(3)]
        pieces = [
            Piece(parameter, lambda gradient=gradient: gradient, shard, on_host, on_host)
            for parameter, gradient, shard, on_host in zip(parameters, self.gradients, self.shards, (False, True))
        ]
        rooms = OwnRooms(self.link)
        self.unit = HostUnit(0, Copies(parameters), pieces, rooms, later=True)
        rooms.make(self.unit)
        self.update = DelayedUpdate(self.link, begun, after, publisher, self.issuer)

    def take(self, number: int) -> None:
        for gradient in self.gradients:
            gradient.fill_(number)
        self.update.take([self.unit])
        self.link.left.synchronize()
        for gradient in self.gradients:
            gradient.fill_(-1)  # as the next iteration does
        self.update.updated(number, by_optimizer=True)

    def iterate(self, number: int, skipped: bool = False) -> float:
        """An iteration and what Megatron's optimizer does behind it; the parameter with which the iteration
        computes."""
        self.update.begin()
        used = self.used()
        self.update.apply()
        if not skipped:
            self.take(number)
        return used

    def used(self) -> float:
        self.link.left.synchronize()
        assert torch.equal(*self.shards)
        return self.shards[0][0].item()

    def close(self) -> None:
        self.update.close()
        self.unit.close()
        self.link.close()


@pytest.fixture
def delayed():
    yield from made_and_closed(Training)


@faults.injected(step_delay_ms=3)
def test_each_update_is_used_one_iteration_later(delayed):
    recorder = Recorder(rank=0)
    one = delayed(recorder=recorder)
    assert [one.iterate(number) for number in range(1, 5)] == [0, 0, 1, 2]
    one.update.apply()
    assert one.used() == 4 and not one.update.pending and one.update.applied == 4
    assert [row[0] for row in recorder.rows if row[0] == "host_step"] == ["host_step"] * 4


def test_a_skipped_iteration_applies_what_is_pending_and_leaves_nothing_behind(delayed):
    one = delayed()
    assert [one.iterate(number, skipped=number in (2, 3)) for number in range(1, 6)] == [0, 0, 1, 1, 1]
    assert one.update.pending and one.update.applied == 1 + 1


@pytest.mark.parametrize("begun", [0, 2])
def test_the_first_iterations_are_not_delayed(delayed, begun):
    one, found = delayed(begun=begun, after=2).update, []
    for iteration in range(4):
        for _ in range(1 + iteration % 2):  # some are run again, by Megatron's rerun machinery
            one.begin()
        found.append(one.delays)
        one.updated(iteration, by_optimizer=True) if iteration < 2 else one.skipped()
    assert found == [begun == 2] * 2 + [True] * 2


@pytest.mark.parametrize("changed", [True, False])
def test_what_somebody_has_changed_is_unknown_to_the_optimizer_until_an_update_is_applied(delayed, changed):
    one, found = delayed(), []
    if changed:
        one.update.changed()
    for number in range(1, 4):
        one.update.begin()
        one.update.apply()
        found.append(one.update.unknown)
        one.take(number)
    assert found == [changed, False, False]


def test_no_step_changes_parameters_while_they_are_published(delayed):
    published = threading.Event()
    one = delayed(published=published.wait)
    one.iterate(1)
    assert all(not piece.parameter.any() for piece in one.unit.pieces)
    published.set()
    one.update.apply()
    assert one.used() == 1


def test_an_error_of_the_thread_reaches_the_training_thread(delayed):
    one = delayed()
    one.unit.optimizer.register_step_pre_hook(lambda *_: 1 / 0)
    one.take(1)
    with pytest.raises(ZeroDivisionError):
        one.update.apply()


@faults.injected(lose_update=2, undelayed=1)
def test_a_lost_update_and_no_delay_are_faults(delayed):
    lost, at_once = delayed(), delayed().update
    assert [lost.iterate(number) for number in range(1, 6)] == [0, 0, 1, 1, 3]
    at_once.begin()
    assert not at_once.delays


def test_parameters_that_somebody_changes_while_an_update_is_pending_are_refused(delayed):
    one = delayed()
    one.update.changed()
    one.iterate(1)
    with pytest.raises(ScheduleError, match="changed while a delayed update was pending: call .*unshard_all"):
        one.update.changed()


class Late(HostDevice):
    """The training thread does not wait for what its compute stream waits for."""

    @property
    def compute(self):
        return SimpleNamespace(wait=lambda event: None, record=lambda event: event)


def test_a_step_begins_when_its_gradients_have_arrived(delayed):
    """Not when it is handed over."""
    one, ready = delayed(device=Late()), threading.Event()
    one.gradients[0].fill_(1)
    one.link.arriving.run(ready.wait)
    one.update.take([one.unit])
    one.update.updated(1, by_optimizer=True)
    threading.Event().wait(0.05)
    assert not one.unit.pieces[0].parameter.any()
    ready.set()
    one.update.apply()
    assert one.unit.pieces[0].parameter.tolist() == [1, 1, 1]
