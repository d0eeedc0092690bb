"""Delayed updates on their thread: what is made when, and what is applied."""

import threading
from types import SimpleNamespace

import faults
import pytest
import torch

from megatron_ext.runtime.device import HostDevice
from megatron_ext.runtime.group import ScheduleError
from megatron_ext.runtime.host_step.delayed import DelayedUpdate
from megatron_ext.runtime.issuer import Issuer
from megatron_ext.runtime.recorder import Recorder


@pytest.fixture
def delayed():
    """``delayed(...)``: a DelayedUpdate of one shard of zeros, whose step number n is to write n."""
    made = []

    def make(begun=0, after=0, published=None, recorder=None, device=HostDevice()):  # noqa: B008
        pair = torch.zeros(3), torch.zeros(3)
        publisher = None if published is None else SimpleNamespace(wait_on_thread=published)
        how = dict(device=device, issuer=Issuer(), recorder=recorder)
        made.append(DelayedUpdate([pair], begun, after, publisher, **how))
        return made[-1]

    yield make
    for one in made:
        one.close()


def iterate(delayed: DelayedUpdate, number: int, skipped: bool = False) -> float:
    """An iteration and what Megatron's optimizer does behind it; the parameter with which the iteration computes."""
    staging, shard = delayed.staged[0]
    delayed.begin()
    used = shard[0].item()
    delayed.apply()
    if not skipped:
        delayed.take(lambda: staging.fill_(number))
        delayed.updated(number, by_optimizer=True)
    return used


@faults.injected(step_delay_ms=3)
def test_each_update_is_used_one_iteration_later(delayed):
    recorder = Recorder(rank=0)
    one = delayed(recorder=recorder)
    assert [iterate(one, number) for number in range(1, 5)] == [0, 0, 1, 2]
    one.apply()
    assert one.staged[0][1].tolist() == [4, 4, 4] and not one.pending and one.applied == 4
    assert [row[0] for row in recorder.rows if row[0] == "host_step"] == ["host_step"] * 4


def test_a_skipped_iteration_applies_what_is_pending_and_leaves_nothing_behind(delayed):
    one = delayed()
    assert [iterate(one, number, skipped=number in (2, 3)) for number in range(1, 6)] == [0, 0, 1, 1, 1]
    assert one.pending and one.applied == 1 + 1


@pytest.mark.parametrize("begun", [0, 2])
def test_the_first_iterations_are_not_delayed(delayed, begun):
    one, found = delayed(begun=begun, after=2), []
    for iteration in range(4):
        for _ in range(1 + iteration % 2):  # some are run again, by Megatron's rerun machinery
            one.begin()
        found.append(one.delays)
        one.updated(iteration, by_optimizer=True) if iteration < 2 else one.skipped()
    assert found == [begun == 2] * 2 + [True] * 2


def test_no_step_changes_parameters_while_they_are_published(delayed):
    published = threading.Event()
    one = delayed(published=published.wait)
    iterate(one, 1)
    assert one.staged[0][0].tolist() == [0, 0, 0]
    published.set()
    one.apply()
    assert one.staged[0][1].tolist() == [1, 1, 1]


def test_an_error_of_the_thread_reaches_the_training_thread(delayed):
    one = delayed()
    one.take(lambda: 1 / 0)
    one.updated(1, by_optimizer=True)
    with pytest.raises(ZeroDivisionError):
        one.apply()


@faults.injected(lose_update=2, undelayed=1)
def test_a_lost_update_and_no_delay_are_faults(delayed):
    lost, at_once = delayed(), delayed()
    assert [iterate(lost, number) for number in range(1, 6)] == [0, 0, 1, 1, 3]
    at_once.begin()
    assert not at_once.delays


def test_parameters_that_somebody_changes_while_an_update_is_pending_are_refused(delayed):
    one = delayed()
    one.changed()
    iterate(one, 1)
    with pytest.raises(ScheduleError, match="changed while a delayed update is pending: call .*unshard_all"):
        one.changed()


class Late(HostDevice):
    """Its compute stream stores flags when the test does."""

    def __init__(self):
        self.stored = []

    @property
    def compute(self):
        return SimpleNamespace(store=lambda *flag: self.stored.append(flag))


def test_gradients_are_read_behind_what_the_compute_stream_was_given(delayed):
    """The step begins when the stream has stored the flag, not when it is handed over."""
    device, stepped = Late(), threading.Event()
    one = delayed(device=device)
    one.take(stepped.set)
    one.updated(1, by_optimizer=True)
    assert not stepped.wait(0.05)
    ((flag, value),) = device.stored
    flag.store(value)
    assert stepped.wait(10)
