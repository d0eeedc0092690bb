"""An imported reduce-scatter by bytes of parameters: logs of other tools count bytes of what is sent, the gradients.

Megatron reduces gradients of 16-bit parameters in float32 unless ``--grad-reduce-in-bf16`` is given
(``megatron/training/arguments.py``), so a group of P bytes sends 2 P.
"""

from collections import Counter

from msgspec.structs import replace

from megatron_ext.cost.cost_table import CostTable
from megatron_ext.cost.curve import by_sizes
from megatron_ext.workload.bucket_layout import ITEM_BYTES
from megatron_ext.workload.workload import Workload


def by_parameter_bytes(table: CostTable, workload: Workload) -> CostTable:
    """``table`` with the sizes of ``reduce`` in bytes of parameters. Where a workload has parameters of several dtypes,
    that of most bytes counts."""
    curve, held = table.reduce, Counter()
    for chunk in workload.chunks:
        for parameter in chunk.parameters:
            held[ITEM_BYTES[parameter.dtype]] += parameter.bytes
    if curve is None or curve.counts == "parameters" or not held:
        return table
    sent, item = workload.optimizer.gradient_item_bytes, held.most_common(1)[0][0]

    return replace(table, reduce=replace(by_sizes(curve, lambda size: size * item // sent), counts="parameters"))
