"""Ranks that use parameters between two iterations wait for each other, or say who does not."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist

from megatron_ext.megatron import gather_on_read
from megatron_ext.megatron.gather_on_read import GatherOnRead
from megatron_ext.runtime.group import ScheduleError


@pytest.fixture
def store(monkeypatch):
    """Both ranks are threads of this process."""
    store = dist.HashStore()
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: store)
    monkeypatch.setattr(dist, "get_rank", lambda: 3)
    return store


def make_pair(monkeypatch, store, seconds, ranks=(3, 7)):
    made = []
    for _ in range(2):
        monkeypatch.setattr(gather_on_read, "RUNS", iter([0]))
        whole, gathered = torch.zeros(4), []
        gather = lambda used, g=gathered: g.append(1)
        reads = GatherOnRead({whole.untyped_storage()._cdata}, gather, [*ranks], seconds)
        made.append((reads, whole, gathered))
    return made


def use(reads, whole, times):
    for _ in range(times):
        reads.open()
        whole.sum()
        reads.close()


def test_ranks_gather_together_and_leave_nothing_in_the_store(monkeypatch, store):
    pair = make_pair(monkeypatch, store, 60)
    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(use, reads, whole, 5) for reads, whole, _ in pair]:
            done.result()
    assert [len(gathered) for *_, gathered in pair] == [5, 5]
    assert store.num_keys() == 2, "of the last time"


def test_a_rank_that_reads_alone_says_where(monkeypatch, store):
    (reads, whole, gathered), _ = make_pair(monkeypatch, store, 0.05)
    with pytest.raises(
        ScheduleError, match=r"test_gather_on_read.py:\d+ in use uses parameters .* \[3, 7\].*unshard_all"
    ):
        use(reads, whole, 1)
    assert gathered == []
    reads.close()


def test_who_reads_alone_behind_a_forced_gather_finds_everything_whole(monkeypatch, store):
    """As the one rank does that writes a checkpoint, in a run in which Megatron gathers."""
    (reads, whole, gathered), _ = make_pair(monkeypatch, store, 0.05)
    sync = reads.until_forced(lambda *parameters, force_sync: whole.sum())
    reads.open()
    sync(force_sync=True)
    whole.sum()
    reads.open()
    sync([whole])
    with pytest.raises(ScheduleError, match="uses parameters"):
        whole.sum()
    assert gathered == []
    reads.close()


def test_a_rank_without_replicas_asks_nobody(monkeypatch, store):
    (reads, whole, gathered), _ = make_pair(monkeypatch, store, 0.05, ranks=[3])
    use(reads, whole, 2)
    assert gathered == [1, 1] and store.num_keys() == 0
