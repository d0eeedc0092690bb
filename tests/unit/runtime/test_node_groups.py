"""How process groups of a run's own are made."""

from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from parallel_sizes import sized

from megatron_ext.runtime import node_groups
from megatron_ext.runtime.node_groups import make_data_group, make_node_groups


@pytest.mark.parametrize("make", [make_data_group, make_node_groups])
@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_gathers_on_a_device_go_before_compute(monkeypatch, make, backend):
    made = []

    class Group:
        def __init__(self, ranks, backend, timeout, pg_options=None):
            made.append(pg_options)

    monkeypatch.setattr(dist, "ProcessGroupNCCL", SimpleNamespace(Options=dict), raising=False)
    monkeypatch.setattr(dist, "ProcessGroup", Group)
    monkeypatch.setattr(dist, "new_group", Group)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    make(sized(dp=4, microbatches=1, gpus_per_node=2), backend)
    assert made and all(
        options == ({"is_high_priority_stream": True} if backend == "nccl" else None) for options in made
    )


@pytest.mark.parametrize(
    ("minutes", "backend", "expected"),
    [(None, "nccl", None), (60, "nccl", 60), (10, "nccl", 10), (60, "gloo", 60), (10, "gloo", 30)],
)
def test_collectives_wait_for_other_ranks_as_long_as_megatrons(monkeypatch, minutes, backend, expected):
    """torch's default is 10 minutes for NCCL and 30 for gloo, whatever the run's other groups have."""
    asked = []
    monkeypatch.setattr(dist, "ProcessGroupNCCL", SimpleNamespace(Options=dict), raising=False)
    monkeypatch.setattr(dist, "new_group", lambda ranks, timeout=None, **how: asked.append(timeout))
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(node_groups, "patience", minutes and timedelta(minutes=minutes))
    make_node_groups(sized(dp=4, microbatches=1, gpus_per_node=2), backend)
    assert {*asked} == {expected and timedelta(minutes=expected)}
