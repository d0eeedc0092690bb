"""A plot of every curve of a cost table, each with what leaving a point out would have said."""

from __future__ import annotations

import math

from megatron_ext.cost.cost_table import CostTable, Curve
from megatron_ext.cost.cost_table_text import all_curves
from megatron_ext.cost.curve import curves_of, lookup, residuals
from megatron_ext.formats import picture
from megatron_ext.formats.errors import InputError

DOTS_BETWEEN = 4
"""Read-outs drawn between two points."""


def save(table: CostTable, path) -> None:
    """Write a PNG: above each curve with its interval, below the residuals of its points.

    Raises:
        InputError: the table has no curve, or the place cannot be written.
    """
    curves = list(all_curves(table))
    if not curves:
        raise InputError("no curve to plot", field="routes")
    # Not pyplot: no window system, no global state. matplotlib draws log scales and PNGs.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = min(len(curves), 3)
    rows = math.ceil(len(curves) / columns)
    figure = Figure(figsize=(5 * columns, 4.6 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(2 * rows, columns, height_ratios=[3, 1] * rows)
    for number, (what, curve) in enumerate(curves):
        row, column = divmod(number, columns)
        above = figure.add_subplot(grid[2 * row, column])
        below = figure.add_subplot(grid[2 * row + 1, column], sharex=above)
        _draw(above, below, what, curve)
    picture.save(path, figure)


def _draw(above, below, what: str, curve: Curve) -> None:
    """One curve into two axes: times with their intervals, and the residuals."""
    for algorithm, points in curves_of(curve).items():
        sizes = [point.size_bytes for point in points]
        line = above.plot(sizes, [point.p50_us for point in points], "o", markersize=3, label=algorithm)[0]
        dense = _dense(sizes)
        read = [lookup(points, size) for size in dense]
        above.plot(dense, [estimate.us for estimate in read], color=line.get_color(), linewidth=1)
        above.fill_between(
            dense, [e.low_us for e in read], [e.high_us for e in read], color=line.get_color(), alpha=0.15, linewidth=0
        )
        inner = [(size, 100 * miss) for size, miss in zip(sizes, residuals(points)) if miss is not None]
        below.plot(
            [size for size, _ in inner],
            [miss for _, miss in inner],
            "o-",
            markersize=3,
            linewidth=0.8,
            color=line.get_color(),
        )
    above.set(title=what, xscale="log", yscale="log", ylabel="us")
    above.set_xscale("log", base=2)
    below.axhline(0, color="black", linewidth=0.5)
    below.set(xlabel="bytes of the whole group", ylabel="left out, %")
    if len(curves_of(curve)) > 1:
        above.legend(fontsize=7)


def _dense(sizes: list[int]) -> list[int]:
    dense = set(sizes)
    for left, right in zip(sizes, sizes[1:]):
        ratio = (right / left) ** (1 / (DOTS_BETWEEN + 1)) if left else 1.0
        dense |= {int(left * ratio**step) for step in range(1, DOTS_BETWEEN + 1)}
    return sorted(size for size in dense if sizes[0] <= size <= sizes[-1])
