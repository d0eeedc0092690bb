"""A cost table and its predictions, as text and as one object."""

from collections.abc import Iterable, Iterator

import msgspec

from megatron_ext.cost.cost_table import CURVES, CostTable, Curve, Point, part_named
from megatron_ext.cost.curve import curves_of, has_points, lookup, residuals
from megatron_ext.cost.estimates import Costs
from megatron_ext.formats.checks import Checker
from megatron_ext.formats.errors import InputError
from megatron_ext.workload.route import ROUTES

HOLDS_FOR = ("hardware", "software", "world_sizes", "model")
"""Fields of the metadata that say for what a table is valid."""

NEIGHBOURS = "read from neighbours: the error if a size is read from the line between the two sizes next to it"
HEAD = f"{'bytes':>12} {'p50 us':>12} {'p95 us':>12} {'GB/s':>8} {'n':>5}  {'read from neighbours':>20}"

OTHERS = tuple(name for name in CURVES if not name.startswith("routes."))


def all_curves(table: CostTable) -> Iterator[tuple[str, Curve]]:
    """Every curve of a table that has points, with its field name."""
    return ((name, part_named(table, name)) for name in CURVES if has_points(part_named(table, name)))


def predicted(
    table: CostTable, route: str, size_bytes: int, *, busy: Iterable[str] = (), extrapolate: bool = False, file=None
) -> dict:
    """The output of ``cost predict``. ``route`` is a route or the field of another curve.

    Raises:
        InputError: a curve is unknown, a size is outside the range, or a pair was never measured.
    """
    Checker("--bytes").size(size_bytes)
    if route not in (*ROUTES, *OTHERS):
        raise InputError(f"known: {', '.join((*ROUTES, *OTHERS))}", file="--route", value=route)
    if busy and route not in ROUTES:
        raise InputError("--busy needs a route", file="--route", value=route)
    name = f"routes.{route}" if route in ROUTES else route
    alone = lookup(part_named(table, name) or Curve(), size_bytes, extrapolate=extrapolate, what=name, file=file)
    estimate = Costs(table, file=file).while_busy(route, size_bytes, busy, alone)
    figures: dict[str, object] = {"us": estimate.us, "low_us": estimate.low_us, "high_us": estimate.high_us}
    if estimate.algorithm is not None:
        figures["algorithm"] = estimate.algorithm
    if estimate.extrapolated:
        figures["extrapolated"] = True
    return figures


def prediction_text(figures: dict) -> str:
    name = f" by {figures['algorithm']}" if "algorithm" in figures else ""
    beyond = ", outside the measured range" if figures.get("extrapolated") else ""
    return f"{figures['us']:.1f} us{name}, between {figures['low_us']:.1f} and {figures['high_us']:.1f}{beyond}"


def largest_miss(points: tuple[Point, ...]) -> float | None:
    """Largest leave-one-out miss of a curve, relative; None with fewer than three points."""
    return max((abs(value) for value in residuals(points) if value is not None), default=None)


def summary(table: CostTable) -> dict:
    """Curves with their ranges and largest leave-one-out misses, and the environment for which the table is valid."""
    curves = {}
    for what, curve in all_curves(table):
        for algorithm, points in curves_of(curve).items():
            name = what if algorithm is None else f"{what}[{algorithm}]"
            curves[name] = {
                "points": len(points),
                "smallest_bytes": points[0].size_bytes,
                "largest_bytes": points[-1].size_bytes,
                "us": [points[0].p50_us, points[-1].p50_us],
                "largest_miss": largest_miss(points),
                "source": curve.source,
            }
    metadata = table.metadata
    return {
        "curves": curves,
        "contention": len(table.contention),
        "compute": len(table.compute),
        **{name: msgspec.to_builtins(getattr(table, name)) for name in ("host_memory", "launches")},
        **{name: getattr(metadata, name) for name in ("synthetic", "created_at", *HOLDS_FOR)},
        "notes": list(metadata.notes),
    }


def text(table: CostTable) -> str:
    """The table as text: one line per point, with the time that its neighbours predict."""
    metadata = table.metadata
    lines = [f"measured {metadata.created_at}" if metadata.created_at else "no date"]
    if metadata.synthetic:
        lines.append("SYNTHETIC: not measured on any machine")
    for part in HOLDS_FOR:
        value = getattr(metadata, part)
        if value:
            said = ", ".join(f"{k} {v}" for k, v in value.items()) if isinstance(value, dict) else value
            lines.append(f"{part}: {said}")
    lines += [f"note: {note}" for note in metadata.notes]
    lines += ["", NEIGHBOURS]
    for what, curve in all_curves(table):
        for algorithm, points in curves_of(curve).items():
            title = what if algorithm is None else f"{what} by {algorithm}"
            lines += ["", f"{title} ({curve.source or 'no source given'})", HEAD]
            for point, miss in zip(points, residuals(points)):
                p95 = f"{point.p95_us:12.1f}" if point.p95_us is not None else f"{'':12}"
                rate = point.size_bytes / point.p50_us / 1e3
                off = f"{miss:+20.1%}" if miss is not None else ""
                row = f"{point.size_bytes:12} {point.p50_us:12.1f} {p95} {rate:8.2f} {point.samples:5}  {off}"
                lines.append(row.rstrip())
    if table.contention:
        lines += ["", "contention: how many times longer the first takes while the second is busy"]
        for row in sorted(table.contention, key=lambda row: (row.measured, row.busy)):
            size = f" at {row.size_bytes} bytes" if row.size_bytes is not None else ""
            lines.append(f"  {row.measured:8} while {row.busy:8} is busy {row.slowdown:6.2f}{size}")
    if table.compute:
        lines += ["", "compute, one micro-batch"]
        for row in table.compute:
            place = row.layer_kind or f"pipeline rank {row.pp_rank}, chunk {row.model_chunk_id}"
            lines.append(f"  {place:32} forward {row.forward_us:10.1f} us, backward {row.backward_us:10.1f} us")
    return "\n".join(lines)
