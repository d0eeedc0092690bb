"""What preparing a scheduled run does to the process. Needs no process group."""

from unittest.mock import MagicMock

import pytest
import torch

from megatron_ext.megatron import build_executor


def test_a_processor_keeps_freed_blocks(monkeypatch):
    kept = []
    monkeypatch.setattr(build_executor, "has_cuda", lambda: False)
    monkeypatch.setattr(build_executor, "keep_freed_blocks", lambda: kept.append(True))
    build_executor.ready_the_host(MagicMock())
    assert kept == [True]


@pytest.mark.parametrize(
    ("others", "ranks"),  # on the same processors, and of the node
    [
        (
            [(0, {0, 1, 2, 3})] * 2 + [(1, {0, 1, 2, 3})],
            (3, 3),
        ),  # torchrun: a node's ranks may run on all of its processors
        ([(0, {4, 5, 6, 7}), (0, {8, 9, 10, 11})], (1, 3)),  # srun: each has its own
    ],
)
def test_a_rank_shares_its_processors_with_the_ranks_that_may_run_on_them(monkeypatch, others, ranks):
    """The heap of a GPU user is left alone."""
    used = []
    own = MagicMock()
    monkeypatch.setattr(build_executor, "keep_freed_blocks", lambda: pytest.fail("blocks are kept"))
    own.schedule.parallel.node_size = 8
    monkeypatch.setattr(build_executor, "has_cuda", lambda: True)
    monkeypatch.setattr(build_executor.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(build_executor.os, "sched_getaffinity", lambda process: {0, 1, 2, 3})
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(build_executor.host_threads, "numa_node", lambda device: 0)
    monkeypatch.setattr(build_executor.host_threads, "use", lambda *ranks: used.append(ranks) or [])
    monkeypatch.setattr(build_executor, "gather_objects", lambda value: [value, *others])
    build_executor.ready_the_host(own)
    assert used == [ranks]
