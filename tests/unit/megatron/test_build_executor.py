"""What preparing a scheduled run does to the process. Needs no process group."""

import gc
import weakref
from unittest.mock import MagicMock

import pytest
import torch
from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer

from megatron_ext.megatron import build_executor


@pytest.mark.parametrize(("cuda", "calls"), [(True, 0), (False, 1)])
def test_the_heap_of_a_gpu_user_is_left_alone(monkeypatch, cuda, calls):
    kept = []
    monkeypatch.setattr(build_executor, "has_cuda", lambda: cuda)
    monkeypatch.setattr(build_executor, "keep_freed_blocks", lambda: kept.append(True))
    build_executor.keep_host_blocks()
    assert len(kept) == calls


def test_the_host_optimizer_that_megatron_replaces_is_freed(monkeypatch):
    """DistributedOptimizer builds it a second time; the first one, with an fp32 copy of all parameters, is a circle."""
    monkeypatch.setattr(torch.cuda, "current_stream", MagicMock())
    monkeypatch.setattr(build_executor, "keep_host_blocks", lambda: None)
    gc.disable()
    try:
        first = HybridDeviceOptimizer(
            [{"params": [torch.randn(3).bfloat16()], "lr": 0.1}],
            offload_fraction=1.0,
            cpu_optimizer_cls=torch.optim.AdamW,
            gpu_optimizer_cls=torch.optim.AdamW,
            param_update_in_fp32=True,
            overlap_cpu_optimizer_d2h_h2d=False,
        )
        seen = weakref.ref(first)
        del first
        assert seen() is not None
        monkeypatch.setattr(build_executor, "has_cuda", lambda: False)
        build_executor.ready_the_host(MagicMock())
        assert seen() is None
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("others", "ranks"),
    [
        ([(0, {0, 1, 2, 3})] * 2 + [(1, {0, 1, 2, 3})], 3),  # torchrun: a node's ranks may run on all of its processors
        ([(0, {4, 5, 6, 7}), (0, {8, 9, 10, 11})], 1),  # srun: each has its own
    ],
)
def test_a_rank_shares_its_processors_with_the_ranks_that_may_run_on_them(monkeypatch, others, ranks):
    used = []
    own = MagicMock()
    own.schedule.parallel.node_size = 8
    monkeypatch.setattr(build_executor, "has_cuda", lambda: True)
    monkeypatch.setattr(build_executor.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(build_executor.os, "sched_getaffinity", lambda process: {0, 1, 2, 3})
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(build_executor.host_threads, "numa_node", lambda device: 0)
    monkeypatch.setattr(build_executor.host_threads, "use", lambda ranks: used.append(ranks) or [])
    monkeypatch.setattr(build_executor, "gather_objects", lambda value: [value, *others])
    build_executor.ready_the_host(own)
    assert used == [ranks]
