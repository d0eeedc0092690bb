"""Process groups of a data-parallel group that spans nodes: inside each node, and across them."""

from datetime import timedelta
from typing import Any, NamedTuple

import torch.distributed as dist

from megatron_ext.runtime import backends
from megatron_ext.workload.nodes import nodes_of_replicas
from megatron_ext.workload.parallel import Parallel

patience: timedelta | None = None
"""How long collectives wait for other ranks, as the run's others do (--distributed-timeout-minutes)."""


class NodeGroups(NamedTuple):
    """The process groups of one rank.

    Attributes:
        local: process group of the data-parallel ranks on its node.
        across: process group of its counterparts, the ranks with its index on their nodes, in
            node order.
        nodes: data-parallel ranks by node.
        index: index of this rank on its node.
    """

    local: dist.ProcessGroup
    across: dist.ProcessGroup
    nodes: list[list[int]]
    index: int

    @property
    def counterparts(self) -> tuple[int, ...]:
        """Data-parallel ranks of ``across``, in its order."""
        return tuple(ranks[self.index] for ranks in self.nodes)


def make_node_groups(parallel: Parallel, backend: str = backends.HOST, ranks: int | None = None) -> NodeGroups | None:
    """New process groups of this rank; None if its data-parallel group lies on one node.

    Collective over all ranks of the run. Raises InputError as :func:`nodes_of_replicas` does.

    Args:
        ranks: size of the data-parallel group, as :meth:`Parallel.replicas` takes it. Experts have another one than
            dense layers.
    """
    found = None
    for pp_rank in range(parallel.pp):
        for members in parallel.replicas(pp_rank, ranks):
            nodes = nodes_of_replicas(parallel, members)
            if len(nodes) == 1:
                continue
            # By node, and by index on a node.
            local, across = (
                [_new_group([members[dp_rank] for dp_rank in dp_ranks], backend) for dp_ranks in among]
                for among in (nodes, zip(*nodes, strict=True))
            )
            for node, dp_ranks in enumerate(nodes):
                for index, dp_rank in enumerate(dp_ranks):
                    if members[dp_rank] == dist.get_rank():
                        found = NodeGroups(local[node], across[index], nodes, index)
    return found


def make_data_group(parallel: Parallel, backend: str, ranks: int | None = None, **how) -> dist.ProcessGroup:
    """A process group of this rank's data-parallel ranks for a single route; called by all ranks of the run.
    ``ranks``: see :func:`make_node_groups`; ``how``: further arguments of ``dist.new_group``."""
    every = [members for pp_rank in range(parallel.pp) for members in parallel.replicas(pp_rank, ranks)]
    groups = [_new_group([*members], backend, **how) for members in every]
    return next(group for members, group in zip(every, groups) if dist.get_rank() in members)


def _high_priority(backend: str) -> dict[str, Any]:
    """Arguments of ``dist.new_group`` that give NCCL's stream priority over compute: a step waits for its gathers."""
    nccl: Any = getattr(dist, "ProcessGroupNCCL", None)
    return {"pg_options": nccl.Options(is_high_priority_stream=True)} if backend == "nccl" else {}


def _new_group(ranks: list[int], backend: str, **how) -> Any:
    longest = patience and (max(patience, dist.default_pg_timeout) if backend == backends.HOST else patience)
    return dist.new_group(ranks, backend=backend, timeout=longest, **(_high_priority(backend) | how))
