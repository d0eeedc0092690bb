"""Combining cost tables: each part from the table that has it, or as chosen."""

import msgspec
import pytest
from two_tables import CLUSTER, ONE_GPU, curve, table

from megatron_ext.cost.combine_tables import combine
from megatron_ext.cost.cost_table import Contention, Routes
from megatron_ext.formats.errors import InputError


def test_combine_takes_each_part_from_the_first_that_has_it():
    both = combine({"cluster": CLUSTER, "gpu": ONE_GPU})
    assert both.routes.gpu == CLUSTER.routes.gpu and both.routes.cpu == ONE_GPU.routes.cpu
    assert both.compute == ONE_GPU.compute and both.contention == ONE_GPU.contention
    parts = both.metadata.source.parts
    assert parts["routes.gpu"] == "cluster" and parts["compute"] == "gpu"
    assert both.metadata.hardware == {"device": "H200"} and both.metadata.synthetic
    assert "cluster: a note" in both.metadata.notes and any("A100" in note for note in both.metadata.notes)


def test_combine_as_chosen():
    both = combine({"cluster": CLUSTER, "gpu": ONE_GPU}, {"links": "gpu"})
    assert both.routes.gpu == ONE_GPU.routes.gpu
    both = combine({"gpu": ONE_GPU, "cluster": CLUSTER}, {"routes.gpu": "cluster"})
    assert both.routes.gpu == CLUSTER.routes.gpu
    with pytest.raises(InputError, match="cluster: compute: has none"):
        combine({"cluster": CLUSTER, "gpu": ONE_GPU}, {"compute": "cluster"})
    with pytest.raises(InputError, match="known parts"):
        combine({"cluster": CLUSTER}, {"routes.warp": "cluster"})


def test_a_curve_with_its_algorithms_comes_from_one_table():
    """Algorithms that were measured on another machine are not those of this one."""
    ring, tree = table(all_reduce=curve(ring=1.0)), table(all_reduce=curve(tree=0.5, ring=9.0))
    assert combine({"a": ring, "b": tree}).all_reduce == ring.all_reduce


def measured_on(nodes: int, tp: int = 1, **parts):
    sizes = {"data_parallel_size": 8 * nodes // tp, "pipeline_model_parallel_size": 1, "ranks_per_node": 8}
    sizes["tensor_model_parallel_size"] = tp
    made = table(**parts)
    return msgspec.structs.replace(made, metadata=msgspec.structs.replace(made.metadata, world_sizes=sizes))


@pytest.mark.parametrize("tp", [1, 4])
def test_what_a_link_between_nodes_costs_beside_others_is_not_taken_from_one_node(tp):
    """The network and a host copy share a GPU's PCIe link; inside a node nothing of it shows."""
    rows = (
        Contention(measured="gpu", busy="cpu", slowdown=1.05),
        Contention(measured="compute", busy="cpu", slowdown=1.02),
    )
    cluster, node = measured_on(4, tp, routes=Routes(gpu=curve(1.0))), measured_on(1, contention=rows)
    both = combine({"cluster": cluster, "node": node})
    assert both.contention == rows[1:] and any("contention of gpu, p2p" in note for note in both.metadata.notes)
    assert combine({"cluster": cluster, "node": node}, {"contention": "node"}).contention == rows
    assert combine({"cluster": measured_on(1, routes=Routes(gpu=curve(1.0))), "node": node}).contention == rows
