"""What changed between two cost tables, and by how much."""

import pytest
from two_tables import CLUSTER, ONE_GPU, table

from megatron_ext.cost.compare_tables import compare, text
from megatron_ext.cost.cost_table import Compute, Contention, GroupOverhead, HostMemory, Launches, Topology


def test_compare_says_what_changed_and_by_how_much():
    changes = compare(CLUSTER, ONE_GPU)
    gpu = changes["curves"]["routes.gpu"]
    assert gpu["median"] == pytest.approx(1.0) and gpu["largest"] == pytest.approx(1.0) and gpu["sizes"] == 12
    assert len(gpu["beyond"]) == 12  # no interval explains a factor of two on a smooth curve
    assert changes["only"]["second"] == ["routes.cpu", "contention", "compute"]
    assert changes["environment"] == ["hardware.device: H200 -> A100"]
    assert "+100.0% median" in text(changes)
    same = compare(ONE_GPU, ONE_GPU)
    assert same["curves"]["routes.gpu"]["largest"] == 0 and not same["curves"]["routes.gpu"]["beyond"]
    assert same["compute"] == {"transformer": 0} and same["contention"] == {"gpu beside cpu, 4096 bytes": 0}


def test_compare_says_launches_and_host_memory():
    def made(factor: float):
        launches = Launches(reduce_us=factor, tensor_us=2.0)
        row = Compute(forward_us=1.0, backward_us=2.0, layer_kind="transformer", forward_launch_us=3.0 * factor)
        return table(launches=launches, host_memory=HostMemory(bytes_per_s=10.0 / factor), compute=(row,))

    figures = compare(made(1.0), made(4.0))["figures"]
    assert figures == {
        "host_memory.bytes_per_s": -0.75,
        "launches of transformer": 3.0,
        "launches.reduce_us": 3.0,
        "launches.slowest": 0.0,
        "launches.tensor_us": 0.0,
    }


def test_compare_says_all_sizes_of_a_pair_and_single_figures():
    def made(slowdowns, call_us):
        rows = tuple(
            Contention(measured="gpu", busy="cpu", slowdown=slowdown, size_bytes=size) for size, slowdown in slowdowns
        )
        return table(
            contention=rows, group_overhead=GroupOverhead(call_us=call_us), topology=Topology(nic_shares_pcie=True)
        )

    changes = compare(made(((1024, 1.0), (4096, 2.0)), 10.0), made(((1024, 1.5), (4096, 2.0)), 100.0))
    assert changes["contention"] == {"gpu beside cpu, 1024 bytes": 0.5, "gpu beside cpu, 4096 bytes": 0}
    assert changes["figures"] == {"group_overhead.call_us": 9.0}
    for said in ("group_overhead.call_us", "+900.0%", "contention gpu during cpu, 1024 bytes"):
        assert said in text(changes)
