"""All-gathers through registered buffers, on a stand-in of torch's calls."""

import contextlib
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as memory
from gathered import as_ranks_do
from symmetric_stand_in import SymmetricStandIn

from megatron_ext.measure import assemble_table
from megatron_ext.measure.operations import TimedSymmetricGather
from megatron_ext.measure.options import Options
from megatron_ext.runtime.device import HostDevice
from megatron_ext.runtime.routes import symmetric_gather as symmetric


@pytest.mark.parametrize(
    ("kind", "ranks", "nodes", "version", "cuda", "policy", "said"),
    [
        ("cpu", 2, 1, (2, 29, 7), "13.0", True, "no CUDA device"),
        ("cuda", 1, 1, (2, 29, 7), "13.0", True, "one rank"),
        ("cuda", 4, 2, (2, 29, 7), "13.0", True, "several nodes"),
        ("cuda", 4, 0, (2, 29, 7), "13.0", True, "several nodes"),
        ("cuda", 2, 1, (2, 27, 5), "13.0", True, "NCCL 2.27.5: gathers by copy engines need 2.28"),
        ("cuda", 2, 1, (2, 29, 7), "12.4", True, "CUDA 12.4: gathers by copy engines need 12.5"),
        ("cuda", 2, 1, (2, 29, 7), "13.0", False, "cannot ask NCCL"),
        ("cuda", 2, 1, (2, 29, 7), "13.0", True, None),
    ],
)
def test_what_is_missing_is_named(monkeypatch, kind, ranks, nodes, version, cuda, policy, said):
    monkeypatch.setattr(symmetric.nccl, "version", lambda: version)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    backend = SimpleNamespace(NCCL_CTA_POLICY_ZERO=2) if policy else SimpleNamespace()
    monkeypatch.setattr(dist, "ProcessGroupNCCL", backend, raising=False)
    for name in ("get_backend", "set_backend"):
        monkeypatch.setattr(memory, name, None, raising=False)  # PyTorch 2.6 lacks them
    why = symmetric.missing(kind, ranks, nodes)
    assert why is None if said is None else said in why
    if said is None:  # what an older torch lacks
        monkeypatch.delattr(memory, "get_backend")
        assert "cannot register memory" in symmetric.missing(kind, ranks, nodes)


@pytest.fixture
def stand_in(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    fake = SymmetricStandIn()
    with contextlib.ExitStack() as stack:
        for patch in fake.patches():
            stack.enter_context(patch)
        yield fake
    dist.destroy_process_group()


class OneRank:
    """What an operation needs of a measurement's rank."""

    options, world_size, torch_device, device = Options(data_parallel_size=1), 1, torch.device("cpu"), HostDevice()

    def __init__(self):
        self.data, self.arena, self.arena_bytes = dist.group.WORLD, torch.rand(256), 1024

    def window(self, memory, size_bytes, round_index):
        return memory[: size_bytes // 4]

    def shard(self, whole):
        return whole.clone()


@pytest.mark.parametrize("refuses", [False, True])
def test_measuring_gathers_as_a_run_does_or_says_why_not(stand_in, monkeypatch, refuses):
    assert TimedSymmetricGather.tried(OneRank()) == (None, "no CUDA device")
    monkeypatch.setattr(symmetric, "missing", lambda *_: None)
    if refuses:
        monkeypatch.setattr(memory, "set_backend", _refuse)
    operation, why = TimedSymmetricGather.tried(OneRank())
    if refuses:
        assert operation is None and why == "NCCL error last"
        raw = {"curves": {}, "symmetric_refused": why}
        assert assemble_table.notes(raw) == [f"all-gathers by copy engines not measured: {why}"]
    else:
        operation.issue(512, 0).wait()
        operation.close()
        assert stand_in.gathers == [[(0, 0), (0, 512)]]


def _refuse(*_, **__):
    raise RuntimeError("NCCL error\nlast")


@pytest.mark.parametrize("own_fails", [True, False])
def test_where_one_rank_has_no_memory_none_waits_for_it(stand_in, monkeypatch, own_fails):
    """Registering is collective: a rank that went on would wait for the other until the time limit."""
    if own_fails:
        monkeypatch.setattr(memory, "empty", _refuse)
    as_ranks_do(monkeypatch, lambda own: [own, "" if own_fails else "out of memory"])
    with pytest.raises(RuntimeError, match="^NCCL error last$" if own_fails else "^out of memory$"):
        symmetric.SymmetricGather(dist.group.WORLD, HostDevice(), {torch.float32: 64})
    assert not stand_in.registered


def test_what_was_measured_becomes_a_curve_of_its_own():
    point = {"p50_us": 10.0, "p95_us": 11.0, "samples": 5, "medians_us": [10.0], "issued_us": 1.0}
    faster = {"size_bytes": 512, **point, "p50_us": 5.0}
    curves = {"gpu": [{"size_bytes": 512, **point}], "symmetric": [faster]}
    gpu = assemble_table.assemble_table(Options(), {"curves": curves}).routes.gpu
    assert gpu.points[0].p50_us == 10.0 and gpu.algorithms["symmetric"][0].p50_us == 5.0


def test_groups_are_gathered_in_memory_that_was_registered_once(stand_in):
    group = dist.new_group([0], backend="gloo", **symmetric.without_thread_blocks(torch.device("cpu")))
    gather = symmetric.SymmetricGather(group, HostDevice(), {torch.float32: 64, torch.bfloat16: 32})
    assert gather.buffer_bytes == 2 * (64 * 4 + 32 * 2)  # the group, and the own shard of one rank
    for numel, dtype in ((64, torch.float32), (16, torch.bfloat16), (32, torch.float32)):
        shard, whole = torch.rand(numel).to(dtype), torch.zeros(numel, dtype=dtype)
        gather.gather(whole, shard, 0).wait()
        assert torch.equal(whole, shard)
    assert stand_in.gathers == [[(1, 0), (1, 256)], [(0, 0), (0, 32)], [(1, 0), (1, 128)]]
    plain = torch.zeros(4)
    dist.all_gather_into_tensor(plain, torch.ones(4), group=group)
    assert stand_in.gathers[-1] == [None, None], "memory that was not registered is not noticed"
    gather.close()
