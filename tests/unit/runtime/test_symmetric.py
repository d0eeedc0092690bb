"""All-gathers through registered buffers, on a stand-in of torch's calls."""

import contextlib
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from symmetric_stand_in import SymmetricStandIn

from megatron_ext.runtime import symmetric
from megatron_ext.runtime.device import HostDevice


@pytest.mark.parametrize(
    ("kind", "ranks", "nodes", "version", "cuda", "policy", "said"),
    [
        ("cpu", 2, 1, (2, 29, 7), "13.0", True, "no CUDA device"),
        ("cuda", 1, 1, (2, 29, 7), "13.0", True, "one rank"),
        ("cuda", 4, 2, (2, 29, 7), "13.0", True, "several nodes"),
        ("cuda", 4, 0, (2, 29, 7), "13.0", True, "several nodes"),
        ("cuda", 2, 1, (2, 27, 5), "13.0", True, "NCCL 2.27.5: copy engines gather from 2.28 on"),
        ("cuda", 2, 1, (2, 29, 7), "12.4", True, "CUDA 12.4: copy engines gather from 12.5 on"),
        ("cuda", 2, 1, (2, 29, 7), "13.0", False, "cannot ask NCCL"),
        ("cuda", 2, 1, (2, 29, 7), "13.0", True, None),
    ],
)
def test_what_is_missing_is_named(monkeypatch, kind, ranks, nodes, version, cuda, policy, said):
    monkeypatch.setattr(symmetric.nccl, "version", lambda: version)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    backend = SimpleNamespace(NCCL_CTA_POLICY_ZERO=2) if policy else SimpleNamespace()
    monkeypatch.setattr(dist, "ProcessGroupNCCL", backend, raising=False)
    why = symmetric.missing(kind, ranks, nodes)
    assert why is None if said is None else said in why


@pytest.fixture
def stand_in(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    fake = SymmetricStandIn()
    with contextlib.ExitStack() as stack:
        for patch in fake.patches():
            stack.enter_context(patch)
        yield fake
    dist.destroy_process_group()


def test_groups_are_gathered_in_memory_that_was_registered_once(stand_in):
    group = dist.new_group([0], backend="gloo", **symmetric.without_thread_blocks(torch.device("cpu")))
    gather = symmetric.SymmetricGather(group, HostDevice(), {torch.float32: 64, torch.bfloat16: 32})
    assert gather.buffer_bytes == 2 * (64 * 4 + 32 * 2)  # the group, and the own shard of one rank
    for numel, dtype in ((64, torch.float32), (16, torch.bfloat16), (32, torch.float32)):
        shard, whole = torch.rand(numel).to(dtype), torch.zeros(numel, dtype=dtype)
        gather.issue(whole, shard).wait()
        assert torch.equal(whole, shard)
    assert stand_in.gathers == [[(1, 0), (1, 256)], [(0, 0), (0, 32)], [(1, 0), (1, 128)]]
    gather.close()
    plain = torch.zeros(4)
    dist.all_gather_into_tensor(plain, torch.ones(4), group=group)
    assert stand_in.gathers[-1] == [None, None], "memory that was not registered is not noticed"
