"""A reduce-scatter by bytes of parameters, as a workload reduces its gradients.

Megatron reduces gradients of 16-bit parameters in float32 unless ``--grad-reduce-in-bf16`` is given
(``megatron/training/arguments.py``), so a group of P bytes sends 2 P, or P. `measure` and data sheets time a reduce of
float32; logs of other tools count bytes of what is sent, the gradients.
"""

from msgspec.structs import replace

from megatron_ext.cost.cost_table import CostTable
from megatron_ext.cost.curve import by_sizes
from megatron_ext.workload.bucket_layout import ITEM_BYTES
from megatron_ext.workload.workload import Workload


def by_parameter_bytes(table: CostTable, workload: Workload) -> CostTable:
    """``table`` with the sizes of ``reduce`` in bytes of parameters whose gradients ``workload`` sends. Where it has
    parameters of several dtypes, that of most bytes counts."""
    curve, parameters = table.reduce, [p for chunk in workload.chunks for p in chunk.parameters]
    item = max(ITEM_BYTES.values(), key=lambda size: sum(p.bytes for p in parameters if ITEM_BYTES[p.dtype] == size))
    sent = workload.optimizer.gradient_item_bytes
    counted = item if curve and curve.counts == "gradients" else ITEM_BYTES["float32"]
    if curve is None or counted == sent:
        return table
    return replace(table, reduce=by_sizes(curve, lambda size: size * counted // sent))
