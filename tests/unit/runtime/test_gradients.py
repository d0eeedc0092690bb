"""Gradients that come and go: bytes only from allocation to the end of the reduce, sums in the shard, refusals."""

import pytest
import torch

from megatron_ext.runtime.device import HostDevice
from megatron_ext.runtime.faults import Faults
from megatron_ext.runtime.gradients import Gradient, Reducer
from megatron_ext.runtime.group import ScheduleError


class Scattered:
    """In place of a reduce-scatter with a rank whose gradient is all ones: it ends when it is waited for."""

    def __init__(self, gradient: Gradient):
        self.gradient = gradient

    def wait(self) -> None:
        self.gradient.part.add_(1)


@pytest.fixture(params=[False, True], ids=["sharded", "host"])
def reducer(request):
    gradients = {}
    for index in (0, 1):
        gradient = gradients[index] = Gradient(index, torch.zeros(8), torch.zeros(4), shard_start=4)
        gradient.issue = lambda gradient=gradient: Scattered(gradient)
    reducer = Reducer(gradients, [0, 1] if request.param else [], HostDevice(), Faults(reduce_delay_ms=2), rank=1)
    yield reducer
    reducer.close()


def sizes(reducer) -> list[int]:
    return [gradient.whole.untyped_storage().nbytes() for gradient in reducer.gradients.values()]


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
    reducer.finish()
    assert sizes(reducer) == [0, 0] and reducer.residency.bytes == 0
    for gradient in (first, second):
        assert gradient.shard.tolist() == [10, 12, 14, 16]


def test_alone_there_is_one_whole_gradient_at_a_time(reducer):
    first, second = reducer.gradients.values()
    for gradient in (second, first, second):
        reducer.allocate(gradient, alone=True)
        gradient.whole += 1
        reducer.reduce(gradient)
    reducer.finish()
    assert reducer.residency.peak == 32 and second.shard.tolist() == [4, 4, 4, 4]


def test_a_gradient_whose_backward_begins_again_is_waited_for(reducer):
    first, _ = reducer.gradients.values()
    for _ in range(2):
        reducer.allocate(first)
        reducer.reduce(first)
    reducer.finish()
    assert first.shard.tolist() == [2, 2, 2, 2] and reducer.residency.peak == 32


def test_what_the_program_must_not_do_is_an_error(reducer):
    first, second = reducer.gradients.values()
    with pytest.raises(ScheduleError, match="the gradient of group 0 is reduced while it is freed"):
        reducer.reduce(first)
    reducer.allocate(first)
    with pytest.raises(ScheduleError, match="the gradient of group 0 is allocated while it is adding"):
        reducer.allocate(first)
    with pytest.raises(ScheduleError, match="the gradient of group 0 is adding at the end of the iteration"):
        reducer.finish()


def test_a_reduce_that_is_not_waited_for_gives_other_sums():
    gradient = Gradient(0, torch.zeros(4), torch.zeros(4), shard_start=0)
    gradient.issue = lambda: Scattered(gradient)
    reducer = Reducer({0: gradient}, [], HostDevice(), Faults(no_wait=1), rank=0)
    reducer.allocate(gradient)
    reducer.reduce(gradient)
    reducer.finish()
    assert gradient.shard.tolist() == [0, 0, 0, 0]
