"""Which data-parallel ranks share a node: host copies and hierarchical gathers go by it."""

from collections.abc import Mapping, Sequence
from itertools import product

from megatron_ext.formats.errors import InputError
from megatron_ext.workload.parallel import Parallel
from megatron_ext.workload.route import HIERARCHICAL, SYMMETRIC, Algorithm


def nodes_of_replicas(parallel: Parallel, pp_rank: int, which: int = 0, ranks: int | None = None) -> list[list[int]]:
    """Data-parallel ranks of a pipeline rank by node.

    Args:
        which, ranks: of the sets of ``ranks`` ranks that :meth:`Parallel.replicas` gives, this one: by default the
            tensor-parallel rank; of experts, expert-tensor-parallel rank + its size * expert-parallel rank.

    Raises:
        InputError: the nodes hold different numbers of them.
    """
    nodes: dict[int, list[int]] = {}
    for dp_rank, node in enumerate(parallel.nodes_of(parallel.replicas(pp_rank, ranks)[which])):
        nodes.setdefault(node, []).append(dp_rank)
    sizes = {len(ranks) for ranks in nodes.values()}
    if len(sizes) > 1:
        kind = f"{'' if ranks in (None, parallel.dp) else 'expert-'}data-parallel"
        said = f"spreads the {ranks or parallel.dp} {kind} ranks of pipeline rank {pp_rank} unevenly over {len(nodes)} "
        said += "nodes; host copies need the same number on each"
        raise InputError(said, field="parallel.gpus_per_node", value=parallel.gpus_per_node)
    return list(nodes.values())


def nodes_spanned(parallel: Parallel, pp_rank: int, ranks: int | None = None) -> int:
    """Nodes on which the first of the sets of ``ranks`` ranks (default: DP) of a pipeline rank lies."""
    return len({*parallel.nodes_of(parallel.replicas(pp_rank, ranks)[0])})


def ranks_of_copy(parallel: Parallel, pp_rank: int, ranks: int | None = None) -> int:
    """The least data-parallel ranks of a node that share a host copy of a group of ``ranks`` ranks (default: DP)."""
    nodes = parallel.nodes_of(parallel.replicas(pp_rank, ranks)[0])
    return min(map(nodes.count, nodes))


def check_spread(parallel: Parallel) -> None:
    """Refuse nodes that hold different numbers of any group's replicas, as :func:`nodes_of_replicas` does."""
    for pp_rank, ranks in product(range(parallel.pp), (parallel.dp, parallel.expert_dp)):
        for which in range(len(parallel.replicas(pp_rank, ranks))):
            nodes_of_replicas(parallel, pp_rank, which, ranks)


def has_hierarchy(parallel: Parallel, pp_rank: int, ranks: int | None = None) -> bool:
    """Whether the data-parallel groups of a pipeline rank span nodes with several ranks on each, as
    many on one as on another: then a gather can go between nodes first and inside them after."""
    sets = range(len(parallel.replicas(pp_rank, ranks)))
    try:
        nodes = [nodes_of_replicas(parallel, pp_rank, which, ranks) for which in sets]
    except InputError:
        return False
    return all(len(of_nodes) > 1 and len(of_nodes[0]) > 1 for of_nodes in nodes)


def algorithm_of_nodes(parallel: Parallel, pp_rank: int, ranks: int | None = None) -> Algorithm | None:
    """The algorithm of route ``gpu`` that the nodes of a pipeline rank allow besides one plain all-gather of a group of
    ``ranks`` ranks (default: DP)."""
    if has_hierarchy(parallel, pp_rank, ranks):
        return HIERARCHICAL
    sets = parallel.replicas(pp_rank, ranks)
    on_one = all(len({*parallel.nodes_of(members)}) == 1 for members in sets)
    return SYMMETRIC if on_one and len(sets[0]) > 1 else None


def copies_of_nobody(parallel: Parallel) -> dict[int, list[int]]:
    """No bytes of host copies yet, as :func:`pinned_bytes_of_nodes` takes them."""
    return {ranks: [0] * parallel.pp for ranks in (parallel.dp, parallel.expert_dp)}


def pinned_bytes_of_nodes(
    parallel: Parallel, copies: Mapping[int, Sequence[int]], of_ranks: Sequence[int]
) -> list[int]:
    """Pinned host bytes of each node.

    Args:
        copies: by the ranks that share a group's shards and by pipeline rank, bytes of host copies. The ranks of a node
            that are of one set of :meth:`Parallel.replicas` share one copy; other sets hold other parameters.
        of_ranks: by pipeline rank, bytes of each of its ranks alone: NVMe staging slots, shards that rest there.
    """
    nodes = [0] * parallel.num_nodes
    for ranks, by_stage in copies.items():
        for pp_rank, size in enumerate(by_stage):
            for members in parallel.replicas(pp_rank, ranks) if size else ():
                for node in {*parallel.nodes_of(members)}:
                    nodes[node] += size
    of_stage = parallel.world_size // parallel.pp
    for rank, node in enumerate(parallel.nodes_of(range(parallel.world_size))):
        nodes[node] += of_ranks[rank // of_stage]
    return nodes


def crossing_bytes(size_bytes: int, nodes: int) -> int:
    """Bytes of a group that enter each of the nodes that its data-parallel ranks are on, when it is published."""
    return size_bytes * (nodes - 1) // nodes
