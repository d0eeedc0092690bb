"""Gathers of two communicators in flight, on one rank of many."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from megatron_ext.doctor import communicators

RANKS = 2048


@pytest.mark.parametrize(("wrong", "status"), [(False, "pass"), (True, "fail")])
def test_results_stay_small_however_many_ranks_there_are_and_each_is_compared(monkeypatch, wrong, status):
    gathered = []

    def gather(whole, shard, group):
        gathered.append(whole.numel())
        whole.copy_((shard[0] + torch.arange(RANKS)).repeat_interleave(shard.numel()))
        if wrong and len(gathered) == 3:
            whole[-1] = 0

    monkeypatch.setattr(communicators, "MOST_ELEMENTS", 4 * RANKS)
    monkeypatch.setattr(dist, "get_backend", lambda group: "nccl")
    monkeypatch.setattr(dist, "all_gather_into_tensor", gather)
    fabric = SimpleNamespace(rank=0, world_size=RANKS, torch_device="cpu", data="a", data_busy="b")
    (found,) = communicators.check(SimpleNamespace(rank=0, world_size=RANKS, on_cuda=False), fabric)
    assert found.status == status and ("1 ended with wrong bytes" in found.found) == wrong
    assert gathered == [4 * RANKS] * 2 * communicators.ROUNDS
