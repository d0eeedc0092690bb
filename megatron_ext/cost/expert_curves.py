"""The costs of experts' groups, which other ranks share than dense parameters' groups.

[Note: What differs]
A group of experts is sharded among the expert-data-parallel ranks. Its all-gathers and reduces are collectives of these
ranks and have curves of their own (``experts`` of the cost table). What each rank does with its own shard alone takes
as long as for a dense group with shards as large, so those curves are read at that size: publishing, the optimizer's
step, and between nodes what each network card carries. A whole group comes from the host or the drive like any other.
"""

from megatron_ext.cost.cost_table import CostTable, Curve, with_curves, with_parts
from megatron_ext.cost.curve import by_sizes, curves_of
from megatron_ext.formats.errors import InputError
from megatron_ext.workload.nodes import nodes_spanned
from megatron_ext.workload.parallel import Parallel


def table_of_experts(table: CostTable, parallel: Parallel) -> CostTable:
    """``table`` by bytes of groups of experts, with their collectives in place of the data-parallel ranks'.

    Raises:
        InputError: it has collectives of the data-parallel ranks, and none of the experts'.
    """
    own, ranks = table.experts, parallel.expert_dp
    for name, dense, curve in (
        ("gpu", table.routes.gpu, own and own.gpu),
        ("reduce", table.reduce, own and own.reduce),
    ):
        if curves_of(dense or ()) and not curves_of(curve or ()):
            said = (
                f"has no points: experts are gathered and reduced among {ranks} ranks, other parameters among "
                f"{parallel.dp}; cost estimate gives curves of both, and cost combine TABLE experts=OTHER takes the "
                f"collectives of a table measured among {ranks} for those of experts"
            )
            raise InputError(said, field=f"experts.{name}")
    if own is not None and own.ranks != ranks:
        raise InputError(f"experts are sharded among {ranks} ranks here", field="experts.ranks", value=own.ranks)
    cards = [n // nodes_spanned(parallel, 0, n) for n in (ranks, parallel.dp)]
    own_shard = ("publish.cpu", "publish.nvme", "optimizer", "host_step", "device_step")
    shares = dict.fromkeys(own_shard, ranks / parallel.dp) | {"publish.internode": cards[0] / cards[1]}

    def scaled(name: str, curve: Curve) -> Curve:
        return by_sizes(curve, lambda size: max(round(size * shares[name]), 1)) if name in shares else curve

    collectives = {"routes.gpu": own and own.gpu, "routes.cpu_shard": None, "reduce": own and own.reduce}
    return with_parts(with_curves(table, scaled), collectives)
