"""How much of a device's memory is measured with."""

from types import SimpleNamespace

import pytest
import torch
from gathered import as_ranks_do
from msgspec.structs import replace

from megatron_ext.measure import fabric as fabric_file
from megatron_ext.measure.fabric import Fabric
from megatron_ext.measure.options import Options

GIB = 1 << 30
OPTIONS = Options(data_parallel_size=1, device="cpu", parameter_bytes=2)


def rank(monkeypatch, options, *, total, free=0, kept=0, sharing=1, others=()) -> Fabric:
    """A rank on a device of ``total`` bytes, of which so many are ``free``, and others torch's own."""
    cuda = SimpleNamespace(
        get_device_properties=lambda device: SimpleNamespace(total_memory=total),
        mem_get_info=lambda device: (free, total),
        memory_reserved=lambda device: kept + GIB,
        memory_allocated=lambda device: GIB,
    )
    monkeypatch.setattr(fabric_file.torch, "cuda", cuda)
    as_ranks_do(monkeypatch, lambda own: [own, *others])
    made = object.__new__(Fabric)
    made.options, made.torch_device, made.ranks_per_device = options, SimpleNamespace(type="cuda"), sharing
    return made


@pytest.mark.parametrize(
    ("gib", "parameter_bytes", "sharing", "others", "measured"),
    [
        (141, 2, 1, (), 13.5),  # fits: all of it
        (24, 2, 1, (), 3.0),  # gradients are float32, twice the bytes
        (24, 4, 1, (), 6.0),
        (24, 2, 2, (), 1.5),
        (80, 2, 1, (24 * GIB,), 3.0),  # the same on all ranks
    ],
)
def test_groups_that_are_measured_leave_room_for_layers(monkeypatch, gib, parameter_bytes, sharing, others, measured):
    """A model of 7 billion parameters is one chunk of 13.5 GiB without a pipeline."""
    options = replace(OPTIONS, max_bytes=int(13.5 * GIB), parameter_bytes=parameter_bytes)
    own = rank(monkeypatch, options, total=gib * GIB, sharing=sharing, others=others)
    assert own.fitting_arena() == pytest.approx(measured * GIB, rel=1e-6) and own.fitting_arena() % 4096 == 0


def test_the_tensors_of_a_step_fit_this_rank_s_part_of_what_is_free(monkeypatch):
    own = rank(monkeypatch, OPTIONS, total=24 * GIB, free=8 * GIB, kept=2 * GIB, sharing=2)
    monkeypatch.setattr(fabric_file.free_host_memory, "available_bytes", lambda: 16 * GIB)
    assert own.has_room(0, 5 * GIB) and not own.has_room(0, 6 * GIB)
    assert own.has_room(16 * GIB, 0) and not own.has_room(17 * GIB, 0)
    own.options = replace(OPTIONS, data_parallel_size=4)
    assert own.has_room(4 * GIB, 0) and not own.has_room(5 * GIB, 0)
    own.torch_device = torch.device("cpu")  # where all is host memory
    assert own.has_room(2 * GIB, 2 * GIB) and not own.has_room(2 * GIB, 3 * GIB)
