"""Until whose end an operation is timed: the median rank would say that a shared link is faster than it is."""

import pytest

from megatron_ext.measure.options import Options
from megatron_ext.measure.visits import sets_of_ranks, writers

ONE_NODE, TWO_NODES = Options(data_parallel_size=4), Options(data_parallel_size=4, ranks_per_node=2)
EACH = [[0], [1], [2], [3]]


def test_writers_are_the_ranks_of_a_group_on_a_node():
    assert writers(TWO_NODES) == [[0, 1], [2, 3]]
    assert writers(Options(data_parallel_size=2, pipeline_model_parallel_size=2)) == [[0, 1], [2, 3]]
    assert writers(Options(data_parallel_size=4, ranks_per_node=1)) == EACH
    assert writers(Options(data_parallel_size=2, tensor_model_parallel_size=2)) == [[0, 2], [1, 3]]


@pytest.mark.parametrize(
    ("name", "one_node", "two_nodes"),
    [
        ("publish", [[0, 1, 2, 3]], [[0, 1], [2, 3]]),
        ("gpu", EACH, [[0, 1, 2, 3]]),
        ("reduce", EACH, [[0, 1, 2, 3]]),
        ("cpu", EACH, EACH),
        ("optimizer", EACH, EACH),
    ],
)
def test_the_last_rank_counts_for_writes_and_between_nodes(name, one_node, two_nodes):
    assert sets_of_ranks(name, ONE_NODE) == one_node
    assert sets_of_ranks(name, TWO_NODES) == two_nodes


def test_every_replica_and_every_pipeline_pair_counts():
    pipeline = Options(data_parallel_size=2, pipeline_model_parallel_size=3, ranks_per_node=1)
    assert sets_of_ranks("gpu", pipeline) == [[0, 1], [2, 3], [4, 5]]
    tensor = Options(data_parallel_size=2, tensor_model_parallel_size=2, ranks_per_node=2)
    assert sets_of_ranks("gpu", tensor) == [[0, 2], [1, 3]]
    assert sets_of_ranks("p2p", pipeline) == EACH  # the third pipeline rank has nobody to talk to


def test_of_pipeline_pairs_those_between_nodes_count():
    """A plan has one figure for messages, and waits for the slowest."""
    options = Options(data_parallel_size=1, pipeline_model_parallel_size=8, ranks_per_node=4)
    assert sets_of_ranks("p2p", options) == [[0], [3], [4], [7]]
