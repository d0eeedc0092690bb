"""Which data-parallel ranks share a node. Host copies and hierarchical gathers depend on it."""

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import product

from megatron_ext.formats.errors import InputError
from megatron_ext.workload.parallel import Parallel
from megatron_ext.workload.route import HIERARCHICAL, SYMMETRIC, Algorithm


def nodes_of_replicas(parallel: Parallel, members: Sequence[int]) -> list[list[int]]:
    """Data-parallel ranks of one set of :meth:`Parallel.replicas`, one list per node.

    Args:
        members: the set: global ranks.

    Raises:
        InputError: the nodes hold different numbers of these ranks.
    """
    nodes: dict[int, list[int]] = {}
    for dp_rank, node in enumerate(parallel.nodes_of(members)):
        nodes.setdefault(node, []).append(dp_rank)
    if len({len(ranks) for ranks in nodes.values()}) > 1:
        pp_rank = members[0] * parallel.pp // parallel.world_size
        kind = f"{'' if len(members) == parallel.dp else 'expert-'}data-parallel"
        said = f"spreads the {len(members)} {kind} ranks of pipeline rank {pp_rank} unevenly over {len(nodes)} "
        said += "nodes; host copies need the same number on each"
        raise InputError(said, field="parallel.gpus_per_node", value=parallel.gpus_per_node)
    return list(nodes.values())


@lru_cache(maxsize=256)
def nodes_spanned(parallel: Parallel, pp_rank: int, ranks: int | None = None) -> int:
    """How many nodes the first set of ``ranks`` ranks (default: DP) of a pipeline rank spans."""
    return len({*parallel.nodes_of(parallel.replicas(pp_rank, ranks)[0])})


def ranks_of_copy(parallel: Parallel, pp_rank: int, ranks: int | None = None) -> int:
    """How many data-parallel ranks of a node share a host copy of a group that ``ranks`` ranks (default: DP) shard: the
    smallest number over the nodes."""
    return min(Counter(parallel.nodes_of(parallel.replicas(pp_rank, ranks)[0])).values())


def check_spread(parallel: Parallel) -> None:
    """Refuse nodes that hold different numbers of any group's replicas, as :func:`nodes_of_replicas` does."""
    for pp_rank, ranks in product(range(parallel.pp), (parallel.dp, parallel.expert_dp)):
        for members in parallel.replicas(pp_rank, ranks):
            nodes_of_replicas(parallel, members)


@lru_cache(maxsize=256)
def has_hierarchy(parallel: Parallel, pp_rank: int, ranks: int | None = None) -> bool:
    """Whether the data-parallel groups of a pipeline rank span several nodes with several ranks on each, the same
    number on every node. A gather can then run between nodes first and inside each node afterwards."""
    try:
        nodes = [nodes_of_replicas(parallel, members) for members in parallel.replicas(pp_rank, ranks)]
    except InputError:
        return False
    return all(len(of_nodes) > 1 and len(of_nodes[0]) > 1 for of_nodes in nodes)


@lru_cache(maxsize=256)  # asked for every group, and it looks at every rank
def algorithm_of_nodes(parallel: Parallel, pp_rank: int, ranks: int | None = None) -> Algorithm | None:
    """The algorithm of route ``gpu`` that the nodes of a pipeline rank allow in addition to a plain all-gather of a
    group that ``ranks`` ranks (default: DP) shard; None if there is no other."""
    if has_hierarchy(parallel, pp_rank, ranks):
        return HIERARCHICAL
    sets = parallel.replicas(pp_rank, ranks)
    on_one = all(len({*parallel.nodes_of(members)}) == 1 for members in sets)
    return SYMMETRIC if on_one and len(sets[0]) > 1 else None


def copies_of_nobody(parallel: Parallel) -> dict[int, list[int]]:
    """Host copies of 0 bytes, in the form that :func:`pinned_bytes_of_nodes` takes."""
    return {ranks: [0] * parallel.pp for ranks in (parallel.dp, parallel.expert_dp)}


def pinned_bytes_of_nodes(
    parallel: Parallel, copies: Mapping[int, Sequence[int]], of_ranks: Sequence[int]
) -> list[int]:
    """Pinned host bytes of each node.

    Args:
        copies: bytes of host copies, by the number of ranks that share a group's shards and by pipeline rank. The ranks
            of a node that belong to one set of :meth:`Parallel.replicas` share one copy. Other sets hold other
            parameters.
        of_ranks: by pipeline rank, the bytes that each of its ranks holds for itself: NVMe staging slots, and shards
            that rest in host memory.
    """
    nodes = [0] * parallel.num_nodes
    for ranks, by_stage in (*copies.items(), (1, of_ranks)):
        for pp_rank, size in enumerate(by_stage):
            for node, number in _sets_on_nodes(parallel, pp_rank, ranks) if size else ():
                nodes[node] += number * size
    return nodes


@lru_cache(maxsize=256)
def _sets_on_nodes(parallel: Parallel, pp_rank: int, ranks: int) -> list[tuple[int, int]]:
    """(node, number of sets of ``ranks`` ranks that have a rank there), for each node of a pipeline rank."""
    sets = parallel.replicas(pp_rank, ranks)
    return [*Counter(node for members in sets for node in {*parallel.nodes_of(members)}).items()]


def crossing_bytes(size_bytes: int, nodes: int) -> int:
    """Bytes of a group that each node of its data-parallel ranks receives from the others when it is published."""
    return size_bytes * (nodes - 1) // nodes
