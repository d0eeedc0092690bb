"""Measured activations in place of counted ones, where both are of the same recompute."""

import pytest
from msgspec.structs import replace
from planning_cases import make_table, make_workload

from megatron_ext.cost.activations import with_activations
from megatron_ext.cost.cost_table import Compute

COUNTED = (1000, 1000)


@pytest.mark.parametrize(
    ("counted_anew", "measured_anew", "taken"),
    [(0, 0, "measured"), (700, 800, "measured"), (700, 0, "counted"), (0, 800, "counted")],
)
def test_a_measurement_is_taken_where_it_recomputes_as_the_run_does(counted_anew, measured_anew, taken):
    work = make_workload(pp=1, vp=1, order="no_pipeline", layers=2)
    kinds = ("transformer",) * work.chunks[0].num_layers
    counted = COUNTED[0], counted_anew
    work = replace(
        work,
        chunks=tuple(
            replace(c, layer_kinds=kinds, activation_bytes=COUNTED, recompute_bytes=counted_anew) for c in work.chunks
        ),
    )
    row = Compute(
        layer_kind="transformer", forward_us=1, backward_us=2, activation_bytes=1100, recompute_bytes=measured_anew
    )
    (chunk,) = with_activations(work, replace(make_table(work), compute=(row,))).chunks
    wanted = counted if taken == "counted" else (1100, measured_anew)
    assert (chunk.activation_bytes[0], chunk.recompute_bytes) == wanted
