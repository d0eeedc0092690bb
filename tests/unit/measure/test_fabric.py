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


@pytest.mark.parametrize(("others", "threads"), [([{0, 1, 2, 3}, {4, 5, 6, 7}], 2), ([{4, 5, 6, 7}] * 2, 4)])
def test_a_rank_has_its_share_of_the_processors_that_it_is_bound_to(monkeypatch, others, threads):
    """srun may have given each rank processors of its own, however it was told to."""
    own = rank(monkeypatch, replace(OPTIONS, data_parallel_size=3), total=GIB)
    own.node, said, bound = 0, [], []
    as_ranks_do(monkeypatch, lambda place: [place, *((0, cores) for cores in others), (1, place[1])])
    monkeypatch.setattr(fabric_file.os, "sched_getaffinity", lambda process: {0, 1, 2, 3})
    monkeypatch.setattr(fabric_file.torch, "set_num_threads", said.append)
    monkeypatch.setattr(fabric_file.host_threads, "numa_node", lambda device: 1)
    monkeypatch.setattr(fabric_file.host_threads, "bind", bound.append)
    own.take_processors()
    assert said == [threads] and bound == [1]
    own.options = replace(own.options, threads=7)  # the user's own
    own.take_processors()
    assert said == [threads]
