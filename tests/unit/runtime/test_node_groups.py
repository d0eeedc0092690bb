"""How process groups of a run's own are made."""

from types import SimpleNamespace

import pytest
import torch.distributed as dist
from parallel_sizes import sized

from megatron_ext.runtime.node_groups import make_data_group, make_node_groups


@pytest.mark.parametrize("make", [make_data_group, make_node_groups])
@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_gathers_on_a_device_go_before_compute(monkeypatch, make, backend):
    made = []

    class Group:
        def __init__(self, ranks, backend, pg_options=None):
            made.append(pg_options)

    monkeypatch.setattr(dist, "ProcessGroupNCCL", SimpleNamespace(Options=dict), raising=False)
    monkeypatch.setattr(dist, "ProcessGroup", Group)
    monkeypatch.setattr(dist, "new_group", Group)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    make(sized(dp=4, microbatches=1, gpus_per_node=2), backend)
    assert made and all(
        options == ({"is_high_priority_stream": True} if backend == "nccl" else None) for options in made
    )
