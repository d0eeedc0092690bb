"""Until whose end an operation is timed: the median rank would say that a shared link is faster than it is."""

from types import SimpleNamespace

import pytest

from megatron_ext.measure import contention, rank_program
from megatron_ext.measure.completion import sets_of_ranks, writers
from megatron_ext.measure.options import Options

ONE_NODE, TWO_NODES = Options(data_parallel_size=4), Options(data_parallel_size=4, ranks_per_node=2)
EACH = [[0], [1], [2], [3]]


def test_writers_are_the_ranks_of_a_group_on_a_node():
    assert writers(TWO_NODES) == [[0, 1], [2, 3]]
    assert writers(Options(data_parallel_size=2, pipeline_model_parallel_size=2)) == [[0, 1], [2, 3]]
    assert writers(Options(data_parallel_size=4, ranks_per_node=1)) == EACH


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
    assert sets_of_ranks("p2p", pipeline) == EACH  # the third pipeline rank has nobody to talk to


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("internode", [(2.0, 4.0), (20.0, 40.0)]),
        ("gpu", [(4.0,), (40.0,)]),
        ("cpu", [(1.0, 2.0, 3.0, 4.0), (10.0, 20.0, 30.0, 40.0)]),
    ],
)
def test_what_a_curve_is_made_of(monkeypatch, name, expected):
    """Ranks that share a link end one after the other."""

    def gathered(everyone, own):
        everyone[:] = [
            {key: tuple([factor * value for value in part] for part in parts) for key, parts in own.items()}
            for factor in (1, 2, 3, 4)
        ]

    monkeypatch.setattr(rank_program.dist, "all_gather_object", gathered)
    fabric, merged = SimpleNamespace(world_size=4, options=TWO_NODES), {}
    rank_program._merge(
        fabric, {(name, 512): SimpleNamespace(us=[1.0, 10.0], issued_us=[1.0], processor_us=[1.0])}, merged
    )
    assert merged[name, 512][0][0] == expected


def test_what_a_row_of_contention_is_made_of():
    """Alone the ranks end at 1, 2, 3 and 4; beside another link the last ends at 6."""
    everyone = [({"gpu": [float(rank)]}, {("gpu", "publish"): [1.5 * rank]}) for rank in (1, 2, 3, 4)]
    assert contention.slowed(("gpu", "publish"), TWO_NODES, everyone) == (6.0, 1.5)
    everyone[3] = ({"gpu": [4.0]}, {("gpu", "publish"): [12.0]})
    assert contention.slowed(("gpu", "publish"), TWO_NODES, everyone) == (12.0, 3.0)
