"""Gradients that come and go: bytes only from allocation to the end of the reduce, sums in the shard, refusals."""

import threading
import time

import faults
import pytest
import torch

from megatron_ext.runtime.device import HostDevice
from megatron_ext.runtime.gradients import Gradient, Reducer
from megatron_ext.runtime.group import ScheduleError
from megatron_ext.runtime.issuer import Issuer
from megatron_ext.runtime.recorder import NOTHING, Recorder
from megatron_ext.workload.state_layout import GRADIENT_SLOTS


class Scattered:
    """In place of a reduce-scatter with a rank whose gradient is all ones: it ends when it is waited for."""

    def __init__(self, gradient: Gradient):
        self.gradient = gradient

    def wait(self) -> None:
        self.gradient.part.add_(1)
        time.sleep(0.01)


def made(on_host=(), count: int = 2, recorder=NOTHING) -> Reducer:
    gradients = {}
    for index in range(count):
        gradient = gradients[index] = Gradient(index, torch.zeros(8), torch.zeros(4), shard_start=4)
        gradient.issue = lambda gradient=gradient: Scattered(gradient)
    return Reducer(gradients, on_host, HostDevice(), Issuer(), recorder=recorder)


@pytest.fixture(params=[False, True], ids=["sharded", "host"])
def reducer(request):
    with faults.injected(reduce_delay_ms=2):
        reducer = made([0, 1] if request.param else [])
        yield reducer
        reducer.close()


def sizes(reducer) -> list[int]:
    return [gradient.whole.untyped_storage().nbytes() for gradient in reducer.gradients.values()]


def test_what_is_forgotten_is_freed_once():
    """A rehearsal forgets all gradients; the pool would count those that are free a second time."""
    reducer, freed = made(), []
    allocated, free = reducer.gradients.values()
    reducer.allocate(allocated)
    for gradient in (allocated, free):
        gradient.resize = lambda size, index=gradient.index: freed.append((index, size))
        gradient.forget()
        gradient.forget()
    assert freed == [(0, 0)]


def test_whole_gradients_have_bytes_until_the_next_reduce_and_sums_stay(reducer):
    first, second = reducer.gradients.values()
    assert sizes(reducer) == [0, 0]
    for visit in (1, 2):
        for gradient, before in ((second, [0, 32]), (first, [32, 32])):
            reducer.allocate(gradient)
            assert sizes(reducer) == before if visit == 1 else gradient.whole.untyped_storage().nbytes() == 32
            assert not gradient.whole.any()
            gradient.whole += torch.arange(8.0)
            reducer.reduce(gradient)
    assert sizes(reducer) == [32, 0]
    assert reducer.residency.peak == 64
    reducer.end()
    assert sizes(reducer) == [0, 0] and reducer.residency.bytes == 0
    for gradient in (first, second):
        assert gradient.shard.tolist() == [10, 12, 14, 16]


def test_a_trace_tells_waits_for_reduces():
    recorder = Recorder(0)
    reducer = made(recorder=recorder)
    for gradient in reducer.gradients.values():
        reducer.allocate(gradient)
        reducer.reduce(gradient)
    reducer.end()
    assert [event.lane for event in recorder.events() if event.duration_us > 1e4] == 2 * ["reduce_wait"]


def test_alone_there_is_one_whole_gradient_at_a_time(reducer):
    first, second = reducer.gradients.values()
    for gradient in (second, first, second):
        reducer.allocate(gradient, alone=True)
        gradient.whole += 1
        reducer.reduce(gradient)
    reducer.end()
    assert reducer.residency.peak == 32 and second.shard.tolist() == [4, 4, 4, 4]


def test_a_gradient_whose_backward_begins_again_is_waited_for(reducer):
    first, _ = reducer.gradients.values()
    for _ in range(2):
        reducer.allocate(first)
        reducer.reduce(first)
    reducer.end()
    assert first.shard.tolist() == [2, 2, 2, 2] and reducer.residency.peak == 32


def test_what_the_program_must_not_do_is_an_error(reducer):
    first, second = reducer.gradients.values()
    with pytest.raises(ScheduleError, match="the gradient of group 0 is reduced while it is freed"):
        reducer.reduce(first)
    reducer.allocate(first)
    with pytest.raises(ScheduleError, match="the gradient of group 0 is allocated while it is adding"):
        reducer.allocate(first)
    with pytest.raises(ScheduleError, match="the gradient of group 0 is adding at the end of the iteration"):
        reducer.end()


@faults.injected(no_wait=1)
def test_a_reduce_that_is_not_waited_for_gives_other_sums():
    reducer = made(count=1)
    (gradient,) = reducer.gradients.values()
    reducer.allocate(gradient)
    reducer.reduce(gradient)
    reducer.end()
    assert gradient.shard.tolist() == [0, 0, 0, 0]


@faults.injected(late_add=0)
def test_a_sum_that_is_added_late_is_in_the_shard_at_the_end():
    reducer = made(on_host=[0])
    first, _ = reducer.gradients.values()
    for _ in range(2):
        reducer.allocate(first)
        reducer.reduce(first)
    reducer.end()
    assert first.shard.tolist() == [2, 2, 2, 2]
    reducer.close()


class SlowShard:
    """A shard that a gradient is added to when the test says so."""

    def __init__(self, shard: torch.Tensor, go_on: threading.Event):
        self.shard, self.go_on = shard, go_on

    def add_(self, part: torch.Tensor) -> None:
        assert self.go_on.wait(10)
        self.shard.add_(part)


def test_sums_in_host_memory_pass_through_a_fixed_number_of_slots():
    """A gradient whose slot is still being added is copied later, and nobody waits for it before it is freed."""
    count = GRADIENT_SLOTS + 1
    reducer, go_on = made(on_host=range(count), count=count), threading.Event()
    assert reducer.staging_bytes == GRADIENT_SLOTS * 16
    gradients = list(reducer.gradients.values())
    shards = [gradient.shard for gradient in gradients]
    for gradient in gradients:
        gradient.shard = SlowShard(gradient.shard, go_on)
        reducer.allocate(gradient)
        gradient.whole += 10 * gradient.index
        reducer.reduce(gradient)
    assert sizes(reducer) == [0] * GRADIENT_SLOTS + [32] and not any(shard.any() for shard in shards)
    go_on.set()
    reducer.end()
    assert [shard.tolist() for shard in shards] == [[10 * index + 1] * 4 for index in range(count)]
    assert sizes(reducer) == [0] * count
    reducer.close()


@pytest.mark.parametrize("on_host", [False, True])
def test_who_steps_early_is_told_of_the_last_reduce_of_a_group(on_host):
    reducer, told = made(on_host=[0] if on_host else []), []
    reducer.complete = lambda index, behind: told.append((index, behind))
    first, second = reducer.gradients.values()
    for last in (False, True):
        reducer.allocate(first)
        reducer.reduce(first, last)
        reducer.allocate(second)
        reducer.reduce(second)
    reducer.end()
    ((index, behind),) = told
    assert index == 0 and (behind is not None) is on_host and (behind is None or behind.ended)
    reducer.close()
