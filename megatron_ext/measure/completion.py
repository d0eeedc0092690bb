"""Until whose end an operation is timed.

[Note: The last rank counts]
A host copy is of use when all of its writers on a node have written. A collective between nodes shares their links:
ranks whose part came first end early while the links still carry the others', and the next transfer waits for
them. Timed by the median rank, transfers in a row would together be faster than the link (measured: gathers by
5 to 9 %, two writers by 20 %). Within one node, where a rank that ends early goes on with its own processor, every rank
counts alike.
"""

from collections.abc import Sequence

from megatron_ext.measure.options import Options

WRITES = {"publish", "internode", "publish_nvme"}
COLLECTIVES = {"gpu", "hierarchical", "symmetric", "cpu_shard", "reduce"}


def until_last(together: list[list[int]], us_of_ranks: Sequence[Sequence[float]]) -> list[tuple[float, ...]]:
    """By round, the times that count, in microseconds.

    Args:
        together: sets of ranks of which the last one counts, see :func:`sets_of_ranks`.
        us_of_ranks: of every rank of the run, its time in every round.
    """
    return [tuple(max(us[rank] for rank in ranks) for ranks in together) for us in zip(*us_of_ranks, strict=True)]


def sets_of_ranks(name: str, options: Options) -> list[list[int]]:
    """Sets of ranks of which the last one counts when ``name`` is timed; a rank that takes no part is in none."""
    dp, ranks = options.data_parallel_size, range(options.world_size)
    if name in WRITES:
        return writers(options)
    if name in COLLECTIVES and options.nodes > 1:
        return [list(ranks[first : first + dp]) for first in ranks[::dp]]
    if name == "p2p":  # an odd last pipeline rank has nobody to talk to
        return [[rank] for rank in ranks if (rank // options.ranks_of_stage) ^ 1 < options.pipeline_model_parallel_size]
    return [[rank] for rank in ranks]


def writers(options: Options) -> list[list[int]]:
    """Ranks of one data-parallel group on one node: together they write its host copy, or its files. Nodes
    may hold different numbers of them, which ``nodes_of_replicas`` refuses."""
    found = {}
    for rank in range(options.world_size):
        found.setdefault((rank // options.data_parallel_size, rank // options.node_size), []).append(rank)
    return list(found.values())
