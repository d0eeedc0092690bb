"""Multiply the figures of a cost table, and find the factors by which another table differs."""

from collections.abc import Callable
from typing import NamedTuple, TypeVar

from msgspec.structs import replace

from megatron_ext.cost import cost_table as cost
from megatron_ext.cost.cost_table import Compute, CostTable, Curve, Launches, Point
from megatron_ext.cost.curve import has_points, lookup
from megatron_ext.cost.estimates import Costs
from megatron_ext.workload.measured_sizes import largest_group_bytes
from megatron_ext.workload.workload import Workload

T = TypeVar("T", Compute, Launches, Point)

CURVES = (
    *("routes.gpu", "routes.cpu", "routes.nvme", "publish.cpu", "p2p", "reduce", "optimizer", "host_step", "host_add"),
    "device_step",
)
"""Curves that can be multiplied."""

_OF_EXPERTS = {"experts.gpu": "routes.gpu", "experts.reduce": "reduce"}
"""Curves of experts, and the curves whose factors they get: the lanes of a trace do not separate these collectives."""


class Factors(NamedTuple):
    """A factor for each curve, for all forwards, for all backwards and for all launches."""

    curves: dict[str, float]
    forward: float
    backward: float
    launches: float = 1.0


def with_factors(
    table: CostTable, curves: dict[str, float], row: Callable[[Compute], Compute], of_algorithms: tuple[str, ...] = ()
) -> CostTable:
    """``table`` with the points of curves times their factors.

    Args:
        curves: factors by names of :data:`CURVES`.
        row: gives the new row for each row of compute.
        of_algorithms: names of curves of which only the points of algorithms are multiplied, if they have any.
    """

    def curve(name: str, given: Curve) -> Curve:
        factor = curves.get(_OF_EXPERTS.get(name, name))
        if factor is None:
            return given

        def scaled_points(field: str, points: tuple[Point, ...]) -> tuple[Point, ...]:
            left_out = field == "points" and name in of_algorithms and given.algorithms
            return points if left_out else tuple(_times(point, "p50_us", "p95_us", by=factor) for point in points)

        return cost.with_points(given, scaled_points)

    return replace(cost.with_curves(table, curve), compute=tuple(map(row, table.compute)))


def _times(given: T, *names: str, by: float) -> T:
    """``given`` with its fields ``names`` times ``by``; fields that are None stay None."""
    return replace(given, **{name: us * by for name in names if (us := getattr(given, name)) is not None})


def scaled(table: CostTable, factors: Factors) -> CostTable:
    """``table`` with its figures times ``factors``."""
    if factors == Factors({}, 1.0, 1.0):
        return table
    ways = {"forward": factors.forward, "backward": factors.backward}
    made = with_factors(table, factors.curves, lambda row: scaled_row(row, ways))
    return cost.check(scaled_launches(made, factors.launches))


def scaled_row(row: Compute, factors: dict[str, float]) -> Compute:
    """``row`` with its forward and backward times multiplied by ``factors["forward"]`` and ``factors["backward"]``."""
    for way, factor in factors.items():
        row = _times(row, f"{way}_us", f"{way}_p95_us", by=factor)
    return row


def scaled_launches(table: CostTable, factor: float) -> CostTable:
    """``table`` with the times of all launches times ``factor``. One factor holds for all: one thread launches."""
    rows = tuple(_times(row, "forward_launch_us", "backward_launch_us", by=factor) for row in table.compute)
    launches = table.launches and _times(table.launches, "reduce_us", "tensor_us", by=factor)
    return replace(table, compute=rows, launches=launches)


def factors_between(estimated: CostTable, measured: CostTable, workload: Workload) -> Factors:
    """The factors from ``estimated`` to ``measured`` for ``workload``: for each curve that both have, at the size of
    the largest group; for compute, over all layers."""
    tables, size, found = (estimated, measured), largest_group_bytes(workload), {}
    for name in CURVES:
        curves = [cost.part_named(table, name) for table in tables]
        if all(map(has_points, curves)):
            before, after = (lookup(curve, size, extrapolate=True).us for curve in curves)
            found[name] = after / before
    sums, launched = [], []
    for costs in map(Costs, tables):
        places = [(chunk.pp_rank, chunk.model_chunk_id, chunk.layer_kinds) for chunk in workload.chunks]
        rows = [us for at, chunk in zip(places, workload.chunks) for us in costs.layer_us(*at, chunk.num_layers)]
        sums.append([sum(pair[way] for pair in rows) for way in (0, 1)])
        launched.append(sum(sum(costs.launches_us(*at) or ()) for at in places))
    launches = launched[1] / launched[0] if all(launched) else 1.0
    return Factors(found, sums[1][0] / sums[0][0], sums[1][1] / sums[0][1], launches)
