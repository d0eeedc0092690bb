"""The rehearsal takes and gives back what an iteration does, in its order."""

from contextlib import contextmanager
from unittest.mock import Mock

import pytest
import torch
from one_rank import OneRank
from planning_cases import make_table, make_workload

from megatron_ext.planner import plan
from megatron_ext.runtime import memory_pool
from megatron_ext.runtime.gradients import Gradient
from megatron_ext.runtime.memory_pool import rehearse

SHAPES = {
    "interleaved": dict(pp=2, vp=2, zero_stage=3),
    "no pipeline": dict(pp=1, vp=1, order="no_pipeline", zero_stage=3),
}


def logged(rank: OneRank) -> list[tuple[int, int]]:
    """``(group index, new size)`` of every resize from now on."""
    log = []

    def wrap(index, resize):
        def run(size):
            log.append((index, size))
            return resize(size)

        return run

    for index, group in rank.groups.items():
        group.resize = wrap(index, group.resize)
    return log


def rehearsed(rank: OneRank) -> None:
    rehearse(rank.schedule, rank.schedule.ranks[0], rank.groups, rank.clock, rank.layers, None)


def held(rank: OneRank) -> int:
    return sum(group.whole.untyped_storage().nbytes() for group in rank.groups.values())


@pytest.mark.parametrize("policy", ["all-gpu", "random:3"])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_rehearsal_resizes_what_an_iteration_resizes_in_its_order(shape, policy):
    work = make_workload(**SHAPES[shape])
    rank = OneRank(plan(work, make_table(work), policy=policy), work)
    log = logged(rank)
    rehearsed(rank)
    in_rehearsal = log.copy()
    assert len({size for _, size in in_rehearsal}) > 1 and not held(rank)
    log.clear()
    rank.iteration()
    assert in_rehearsal[: len(log)] == log and rank.events


@pytest.fixture(autouse=True)
def any_torch_is_new_enough(monkeypatch):
    monkeypatch.setattr(memory_pool, "LEAST_TORCH", (2, 0))


def test_a_run_says_that_its_torch_is_too_old_for_a_pool(monkeypatch):
    monkeypatch.setattr(memory_pool, "LEAST_TORCH", (99, 0))
    said = memory_pool.MemoryPool(Mock(kind="cuda")).fill(lambda: None)
    assert said is not None and said.startswith(f"PyTorch {torch.__version__} makes no pool")
    assert memory_pool.MemoryPool(Mock(kind="cpu")).fill(lambda: None) is None


def test_a_run_says_that_torchs_other_allocator_has_no_pool(monkeypatch):
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "backend:cudaMallocAsync")
    monkeypatch.setattr(torch.cuda, "MemPool", Mock(side_effect=RuntimeError("does not yet support")))
    said = memory_pool.MemoryPool(Mock(kind="cuda")).fill(lambda: None)
    assert said is not None and said.startswith("with backend:cudaMallocAsync PyTorch makes no pool")


def test_a_pool_ends_with_its_run(monkeypatch):
    """A later end, with the model, could fall into the allocation of another run's pool."""
    ended = []

    class Pool:
        def __del__(self):
            ended.append(self)

    monkeypatch.setattr(torch.cuda, "MemPool", Pool)
    pool = memory_pool.MemoryPool(Mock(kind="cuda"))
    assert not ended
    pool.close()
    assert len(ended) == 1


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (torch.cuda.OutOfMemoryError("CUDA out of memory"), "has no room for a pool"),
        (RuntimeError("MemPool doesn't currently support expandable_segments."), "this PyTorch makes no pool"),
    ],
)
def test_a_run_goes_on_without_a_pool_that_cannot_be_filled(monkeypatch, error, words):
    for name, does in (("empty_cache", lambda: None), ("memory_reserved", lambda: 0), ("MemPool", Mock)):
        monkeypatch.setattr(torch.cuda, name, does)
    monkeypatch.setattr(torch.cuda, "use_mem_pool", Mock(side_effect=error))
    pool = memory_pool.MemoryPool(Mock(kind="cuda"))
    assert words in pool.fill(lambda: None) and pool.fill(lambda: None) is None
    monkeypatch.setattr(torch.cuda, "use_mem_pool", Mock(side_effect=RuntimeError("an illegal access")))
    with pytest.raises(RuntimeError, match="illegal"):
        memory_pool.MemoryPool(Mock(kind="cuda")).fill(lambda: None)


class FullDevice:
    """A device without a free byte, of which torch holds ``cached`` bytes in free blocks outside of the pool. As with
    PyTorch's issue 175015, these are not freed for an allocation within the pool."""

    def __init__(self, cached: int):
        self.cached, self.free, self.in_pool = cached, 0, False

    @contextmanager
    def use_mem_pool(self, pool):
        self.in_pool = True
        try:
            yield
        finally:
            self.in_pool = False

    def empty_cache(self):
        assert not self.in_pool, "torch frees nothing"
        self.free, self.cached = self.free + self.cached, 0

    def resize(self, size: int):
        if size > self.free:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")
        self.free -= size


@pytest.fixture
def served(monkeypatch):
    """``served(device)``: a gradient of 32 bytes that takes its memory from a pool of the device."""

    def make(device: FullDevice) -> Gradient:
        for name in ("use_mem_pool", "empty_cache"):
            monkeypatch.setattr(torch.cuda, name, getattr(device, name))
        monkeypatch.setattr(torch.cuda, "MemPool", Mock)
        gradient = Gradient(0, torch.zeros(8), torch.zeros(8), 0)
        gradient.resize = device.resize
        memory_pool.MemoryPool(Mock(kind="cuda")).serve(gradient)
        return gradient

    return make


def test_a_pool_that_lacks_a_block_gets_it_from_the_free_blocks_of_others(served):
    """torch may have given a block of the pool to an activation, and not have had it back."""
    device = FullDevice(cached=40)
    served(device).resize(32)
    assert (device.free, device.cached) == (8, 0)


def test_a_pool_is_out_of_memory_if_no_other_block_is_free(served):
    with pytest.raises(torch.cuda.OutOfMemoryError):
        served(FullDevice(cached=31)).resize(32)


def test_a_device_that_is_full_leaves_no_group_whole():
    work = make_workload(**SHAPES["no pipeline"])
    rank = OneRank(plan(work, make_table(work), policy="all-gpu"), work)
    log, group = logged(rank), next(iter(rank.groups.values()))
    inner, left = group.resize, 1

    def full(size):
        nonlocal left
        if size and not left:
            raise MemoryError
        left -= bool(size)
        return inner(size)

    for one in rank.groups.values():
        one.resize = full if one is group else one.resize
    with pytest.raises(MemoryError):
        rehearsed(rank)
        rehearsed(rank)
    assert log and not held(rank)
