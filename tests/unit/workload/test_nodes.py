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


def test_replicas_by_node():
    assert nodes_of_replicas(sizes(), 0) == [[0, 1, 2, 3]]
    assert nodes_of_replicas(sizes(gpus_per_node=2), 0) == [[0, 1], [2, 3]]
    assert nodes_of_replicas(sizes(gpus_per_node=1), 0) == [[0], [1], [2], [3]]
    pipeline = sizes(pipeline_model_parallel_size=2, data_parallel_size=2, gpus_per_node=2, order="1f1b")
    assert [nodes_of_replicas(pipeline, rank) for rank in (0, 1)] == [[[0, 1]], [[0, 1]]]


def test_each_instance_of_the_optimizer_has_its_own_host_copy():
    two = sizes(num_distributed_optimizer_instances=2)
    assert [pinned_bytes_of_nodes(parallel, {2: [10]}, [1]) for parallel in (two, replace(two, gpus_per_node=2))] == [
        [24],
        [12, 12],
    ]
    assert nodes_of_replicas(replace(two, gpus_per_node=1), 0) == [[0], [1]] and has_hierarchy(
        sizes(num_distributed_optimizer_instances=2, data_parallel_size=8, gpus_per_node=2), 0
    )


def test_an_uneven_spread_is_refused():
    uneven = sizes(pipeline_model_parallel_size=2, data_parallel_size=3, gpus_per_node=2, order="1f1b")
    with pytest.raises(
        InputError, match="gpus_per_node = 2: spreads the 3 data-parallel ranks of pipeline rank 0 unevenly"
    ):
        nodes_of_replicas(uneven, 0)


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
    assert nodes_of_replicas(experts, 0) == [[0, 1], [2, 3]]
    assert [nodes_of_replicas(experts, 0, which, experts.expert_dp) for which in (0, 1)] == [[[0], [1]], [[0], [1]]]
    assert has_hierarchy(experts, 0) and not has_hierarchy(experts, 0, experts.expert_dp)
