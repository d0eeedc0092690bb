"""A cost table as a plan reads it: by bytes of experts' groups, or with reduces by bytes of parameters.

[Note: Experts]
A group of experts is sharded among the expert-data-parallel ranks. Its all-gathers and reduces are collectives of these
ranks and have curves of their own (``experts`` of the cost table). Work of a rank on its own shard takes as long as for
a dense group whose shards are as large, so the curves of this work are read at the size of that group: publishing, the
optimizer's step, and the bytes that each network card carries between nodes. Copies of a whole group from the host or
the drive cost the same as for any other group.

[Note: Bytes of a reduce]
Megatron reduces gradients of 16-bit parameters in float32 unless ``--grad-reduce-in-bf16`` is given
(``megatron/training/arguments.py``), so a group of P bytes sends 2 P, or P. `measure` and data sheets time a reduce of
float32. Logs of other tools count the bytes that are sent: those of gradients.
"""

from msgspec.structs import replace

from megatron_ext.cost.cost_table import CostTable, Curve, with_curves, with_parts
from megatron_ext.cost.curve import by_sizes, curves_of
from megatron_ext.formats.errors import InputError
from megatron_ext.workload.bucket_layout import ITEM_BYTES
from megatron_ext.workload.nodes import nodes_spanned
from megatron_ext.workload.parallel import Parallel
from megatron_ext.workload.workload import Workload


def table_of_experts(table: CostTable, parallel: Parallel) -> CostTable:
    """``table`` by bytes of experts' groups, with the experts' collectives in place of those of data-parallel ranks.

    Raises:
        InputError: it has collectives of the data-parallel ranks but none of the experts.
    """
    own, ranks = table.experts, parallel.expert_dp
    for name, dense, curve in (
        ("gpu", table.routes.gpu, own and own.gpu),
        ("reduce", table.reduce, own and own.reduce),
    ):
        if curves_of(dense or ()) and not curves_of(curve or ()):
            said = (
                f"has no points: experts are gathered and reduced among {ranks} ranks, other parameters among "
                f"{parallel.dp}; megatron-ext measure or cost estimate gives curves of both, and cost combine TABLE "
                f"experts=OTHER takes the collectives of a table measured among {ranks} for those of experts"
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


def by_parameter_bytes(table: CostTable, workload: Workload) -> CostTable:
    """``table`` with the sizes of ``reduce`` in bytes of the parameters whose gradients ``workload`` sends. If the
    parameters have several dtypes, the item size with most bytes counts."""
    curve, parameters = table.reduce, [p for chunk in workload.chunks for p in chunk.parameters]
    item = max(ITEM_BYTES.values(), key=lambda size: sum(p.bytes for p in parameters if ITEM_BYTES[p.dtype] == size))
    sent = workload.optimizer.gradient_item_bytes
    counted = item if curve and curve.counts == "gradients" else ITEM_BYTES["float32"]
    if curve is None or counted == sent:
        return table
    return replace(table, reduce=by_sizes(curve, lambda size: size * counted // sent))
