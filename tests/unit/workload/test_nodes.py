"""Which data-parallel ranks share a node."""

import pytest
from msgspec.structs import replace

from megatron_ext.formats.errors import InputError
from megatron_ext.workload.nodes import has_hierarchy, nodes_of_replicas, pinned_bytes_of_nodes
from megatron_ext.workload.parallel import Parallel


def sizes(**values) -> Parallel:
    return Parallel(
        **{
            "pipeline_model_parallel_size": 1,
            "num_microbatches": 4,
            "order": "no_pipeline",
            "data_parallel_size": 4,
            **values,
        }
    )


def by_node(parallel: Parallel, pp_rank: int, which: int = 0, ranks: int | None = None) -> list[list[int]]:
    return nodes_of_replicas(parallel, parallel.replicas(pp_rank, ranks)[which])


def test_replicas_by_node():
    assert by_node(sizes(), 0) == [[0, 1, 2, 3]]
    assert by_node(sizes(gpus_per_node=2), 0) == [[0, 1], [2, 3]]
    assert by_node(sizes(gpus_per_node=1), 0) == [[0], [1], [2], [3]]
    pipeline = sizes(pipeline_model_parallel_size=2, data_parallel_size=2, gpus_per_node=2, order="1f1b")
    assert [by_node(pipeline, rank) for rank in (0, 1)] == [[[0, 1]], [[0, 1]]]


def test_each_instance_of_the_optimizer_has_its_own_host_copy():
    two = sizes(num_distributed_optimizer_instances=2)
    assert [pinned_bytes_of_nodes(parallel, {2: [10]}, [1]) for parallel in (two, replace(two, gpus_per_node=2))] == [
        [24],
        [12, 12],
    ]
    assert by_node(replace(two, gpus_per_node=1), 0) == [[0], [1]] and has_hierarchy(
        sizes(num_distributed_optimizer_instances=2, data_parallel_size=8, gpus_per_node=2), 0
    )


def test_an_uneven_spread_is_refused():
    uneven = sizes(pipeline_model_parallel_size=2, data_parallel_size=3, gpus_per_node=2, order="1f1b")
    with pytest.raises(
        InputError, match="gpus_per_node = 2: spreads the 3 data-parallel ranks of pipeline rank 0 unevenly"
    ):
        by_node(uneven, 0)


def test_a_hierarchy_has_several_nodes_and_several_ranks_on_each():
    assert has_hierarchy(sizes(gpus_per_node=2), 0)
    assert not has_hierarchy(sizes(), 0) and not has_hierarchy(sizes(gpus_per_node=1), 0)
    # Neighbours on a node are tensor-parallel ranks of one replica.
    assert not has_hierarchy(sizes(tensor_model_parallel_size=2, gpus_per_node=2), 0)
    assert has_hierarchy(sizes(tensor_model_parallel_size=2, gpus_per_node=4), 0)
    assert not has_hierarchy(
        sizes(pipeline_model_parallel_size=2, data_parallel_size=3, gpus_per_node=2, order="1f1b"), 0
    )


def test_experts_are_spread_over_nodes_by_their_own_ranks():
    experts = sizes(expert_model_parallel_size=2, gpus_per_node=2)
    assert by_node(experts, 0) == [[0, 1], [2, 3]]
    assert [by_node(experts, 0, which, experts.expert_dp) for which in (0, 1)] == [[[0], [1]], [[0], [1]]]
    assert has_hierarchy(experts, 0) and not has_hierarchy(experts, 0, experts.expert_dp)


def test_the_ranks_of_a_run_are_counted_once_however_often_bytes_are_asked_for(monkeypatch):
    """A plan within a limit asks once for every group, a run once for every node."""
    many = sizes(pipeline_model_parallel_size=4, data_parallel_size=64, gpus_per_node=8, order="1f1b")
    looked, node_of = [], Parallel.nodes_of

    def counted(self, ranks):
        found = node_of(self, ranks)
        looked.extend(found)
        return found

    monkeypatch.setattr(Parallel, "nodes_of", counted)
    for number in range(20):
        copies, own = {64: [number] * 4}, [1, 0, 0, 2]
        assert pinned_bytes_of_nodes(many, copies, own) == [number + 8] * 8 + [number] * 16 + [number + 16] * 8
    assert len(looked) <= 2 * many.world_size
