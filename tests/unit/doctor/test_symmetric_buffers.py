"""What is said where copy engines cannot gather, and what is done where they may, on stand-ins of torch's calls."""

import sys
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from megatron_ext.doctor import symmetric_buffers
from megatron_ext.doctor.place import Place
from megatron_ext.runtime.routes import symmetric_gather as symmetric

NCCL = SimpleNamespace(NCCL_CTA_POLICY_ZERO=2)


def place(kind: str = "cuda", ranks: int = 2, per_node: int = 2) -> Place:
    # No torch.device: where another test has made torch.cuda speak of the CPU, it would be the CPU.
    return Place(0, ranks, 0, per_node, SimpleNamespace(type=kind, index=0), lambda value: [value], None)


def test_what_is_missing_is_named():
    (finding,) = symmetric_buffers.check(place("cpu"), None)
    assert finding.status == "could not try" and "no CUDA device; all-gathers use NCCL's kernels" in finding.found


@pytest.fixture
def device(monkeypatch):
    """Two ranks' gathers by copies; the calls that a device would time take 10 us each."""
    monkeypatch.setattr(symmetric.nccl, "version", lambda: (2, 29, 7))
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(dist, "ProcessGroupNCCL", NCCL, raising=False)
    names = dict.fromkeys(("empty", "rendezvous", "get_backend", "set_backend"))  # torch 2.6 lacks some
    monkeypatch.setitem(sys.modules, "torch.distributed._symmetric_memory", SimpleNamespace(**names))
    monkeypatch.setattr(symmetric_buffers, "ELEMENTS", 4)
    event = SimpleNamespace(record=lambda: None, synchronize=lambda: None, elapsed_time=lambda end: 0.1)
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: event)
    full = torch.full
    monkeypatch.setattr(torch, "full", lambda shape, value, dtype, device: full(shape, value, dtype=dtype))
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda numel, dtype, device: empty(numel, dtype=dtype))


@pytest.mark.parametrize(("second", "status"), [(1.0, "pass"), (0.0, "fail")])
def test_what_was_gathered_is_compared(monkeypatch, device, second, status):
    def gather(target, shard, group=None):
        target[:4], target[4:] = shard, second
        return SimpleNamespace(wait=lambda: None)

    def gathered(target, shard, start):
        assert len(shard) == 4 and start == 0
        return gather(target, shard)

    monkeypatch.setattr(symmetric_buffers, "symmetric_gather", lambda place, whole: SimpleNamespace(gather=gathered))
    monkeypatch.setattr(dist, "all_gather_into_tensor", gather)
    (finding,) = symmetric_buffers.check(place(), SimpleNamespace(data="plain"))
    assert finding.status == status
    if status == "pass":
        assert finding.figures == {"symmetric_us": pytest.approx(10), "plain_us": pytest.approx(10)}


def test_a_library_that_refuses_is_told_in_one_line(monkeypatch, device):
    def refuse(place, whole):
        raise RuntimeError("NCCL error: unhandled\nlast error")

    monkeypatch.setattr(symmetric_buffers, "symmetric_gather", refuse)
    (finding,) = symmetric_buffers.check(place(), None)
    assert finding.status == "could not try" and "unhandled last error" in finding.found
