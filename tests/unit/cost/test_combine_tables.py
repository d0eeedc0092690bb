"""Combining cost tables: each part from the table that has it, or as chosen."""

import pytest
from two_tables import CLUSTER, ONE_GPU, curve, table

from megatron_ext.cost.combine_tables import combine
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


def test_combine_joins_algorithms():
    ring, tree = table(all_reduce=curve(ring=1.0)), table(all_reduce=curve(tree=0.5, ring=9.0))
    algorithms = combine({"a": ring, "b": tree}).all_reduce.algorithms
    assert set(algorithms) == {"ring", "tree"} and algorithms["ring"] == ring.all_reduce.algorithms["ring"]
