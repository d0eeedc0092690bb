"""The picture of one pipeline iteration: simulated above measured, on one time scale."""

import io
from typing import NamedTuple

from megatron_ext import files
from megatron_ext.report.build import Report
from megatron_ext.report.measured import Window
from megatron_ext.report.rows import Row, rows, shown_ranks
from megatron_ext.report.spread import median_iteration
from megatron_ext.schedule.trace import Event

WIDTH_PX, DPI = 1600, 100

COLORS = {
    "F": "#a6cee3", "B": "#3f7fb5", "optimizer": "#8c8c8c", "wait": "#e31a1c", "issue": "#1a1a1a",
    "gpu": "#33a02c", "cpu": "#ff7f00", "nvme": "#6a3d9a", "publish": "#b15928", "reduce": "#e7a6c8", "p2p": "#c9c9c9",
}  # fmt: skip

MEANING = {
    "F": "forward step", "B": "backward step", "optimizer": "optimizer step", "wait": "exposed: a step waits for a gather",
    "issue": "issuing gathers", "gpu": "gather by gpu (all-gather)", "cpu": "gather by cpu (copy from the host)",
    "nvme": "stage in from nvme", "publish": "publish to the host copy", "reduce": "gradient reduction", "p2p": "message between stages",
}  # fmt: skip

THREAD_HEIGHT, LINK_HEIGHT, GAP = 1.0, 0.5, 0.35
"""Row heights, and the space between ranks, in the same unit."""

UNIT_INCH = 0.3


class Panel(NamedTuple):
    """One iteration as drawn. ``step`` is the (begin, end) of its step time, microseconds."""

    title: str
    rows: list[Row]
    step: tuple[float, float]


def panels(report: Report) -> list[Panel]:
    """Scheduled simulated, scheduled measured, stock measured."""
    run = report.run
    parallel = run.workload.parallel
    windows = representatives(report)
    simulated = report.simulated["scheduled"]
    found = [
        Panel(
            "by the schedule, SIMULATED",
            rows(simulated, shown_ranks(parallel, replicas=False)),
            (0.0, report.predicted_step_time_us.scheduled),
        )
    ]
    for which, replicas in (("scheduled", True), ("stock", False)):
        window = windows[which]
        took = getattr(run, which).iteration_us[window.iteration - 1]
        name = {"scheduled": "by the schedule", "stock": "stock Megatron"}[which]
        found.append(
            Panel(
                f"{name}, MEASURED (iteration {window.iteration} of {run.iterations}, the one nearest to the median)",
                rows(window.events, shown_ranks(parallel, replicas=replicas)),
                (window.end_us - took, window.end_us),
            )
        )
    return found


def representatives(report: Report) -> dict[str, Window]:
    """Of each run, the iteration of median length that no evaluation came before."""
    run = report.run
    found = {}
    for which, metrics, trace in (("stock", run.stock, run.stock_trace), ("scheduled", run.scheduled, run.scheduled_trace)):
        usable = [not trace.evaluated_before(number) for number in range(1, run.iterations + 1)]
        found[which] = trace.window(median_iteration(metrics.iteration_us, usable))
    return found


def save(report: Report, path) -> None:
    """Write the picture as PNG, ``WIDTH_PX`` wide.

    Raises:
        InputError: the place cannot be written.
    """
    # matplotlib without pyplot: no window system, no global state.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    drawn = panels(report)
    heights = [_height(panel) for panel in drawn]
    top, bottom, between = 0.75, 0.95, 0.45
    inches = top + bottom + sum(heights) * UNIT_INCH + between * (len(drawn) - 1)
    figure = Figure(figsize=(WIDTH_PX / DPI, inches), dpi=DPI)
    FigureCanvasAgg(figure)
    left, right = 0.085, 0.865
    end_us = max(max(panel.step[1] for panel in drawn), max(b.start_us + b.duration_us for p in drawn for r in p.rows for b in r.bars))
    us_per_px = end_us * 1.01 / (WIDTH_PX * (right - left))
    y = inches - top
    for panel, height in zip(drawn, heights):
        y -= height * UNIT_INCH
        axes = figure.add_axes((left, y / inches, right - left, height * UNIT_INCH / inches))
        _draw(axes, panel, us_per_px, last=panel is drawn[-1])
        axes.set_xlim(0, end_us * 1.01 / 1e3)
        y -= between
    _legend(figure, drawn)
    figure.text(0.01, 1 - 0.28 / inches, "One iteration: where the time goes", fontsize=14, fontweight="bold", va="center")
    figure.text(left, 0.62 / inches, "milliseconds since the fresh parameters were there; intervals shorter than a pixel are drawn as one", fontsize=9, va="center")
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=DPI)
    files.write_atomically(path, buffer.getvalue())


def _height(panel: Panel) -> float:
    ranks = len({row.rank for row in panel.rows})
    return sum(THREAD_HEIGHT if row.lane == "thread" else LINK_HEIGHT for row in panel.rows) + GAP * (ranks + 1)


def _draw(axes, panel: Panel, us_per_px: float, *, last: bool) -> None:
    height = _height(panel)
    axes.set_ylim(0, height)
    axes.set_title(panel.title, loc="left", fontsize=10.5, pad=4, fontweight="bold")
    y = height
    rank = None
    for row in panel.rows:
        if row.rank != rank:
            y -= GAP
            rank = row.rank
        tall = THREAD_HEIGHT if row.lane == "thread" else LINK_HEIGHT
        y -= tall
        _draw_row(axes, row, y + 0.04, tall - 0.08, us_per_px)
        name = f"rank {row.rank}" if row.lane == "thread" else row.lane
        axes.text(-0.006, y + tall / 2, name, transform=axes.get_yaxis_transform(), ha="right", va="center", fontsize=9 if row.lane == "thread" else 7.5, fontweight="bold" if row.lane == "thread" else "normal")
        axes.text(1.004, y + tall / 2, _said(row), transform=axes.get_yaxis_transform(), ha="left", va="center", fontsize=7.5, color="#333333")
    begin, end = (us / 1e3 for us in panel.step)
    if begin > 0.5 * us_per_px / 1e3:
        axes.axvspan(0, begin, color="#f2f2f2", zorder=0)
        axes.text(begin / 2, 0.06, "between\niterations", fontsize=6.5, color="#666666", ha="center", va="bottom")
    axes.axvline(end, color="black", linewidth=1, linestyle="--")
    axes.annotate(f"step time {end - begin:.1f} ms", (end, height), xytext=(-4, 4), textcoords="offset points", ha="right", va="bottom", fontsize=9.5)
    axes.set_yticks([])
    axes.tick_params(axis="x", labelsize=8)
    axes.grid(axis="x", color="#dddddd", linewidth=0.6, zorder=0)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


def _draw_row(axes, row: Row, y: float, tall: float, us_per_px: float) -> None:
    by_kind: dict[str, list] = {}
    for bar in row.bars:
        by_kind.setdefault(bar.kind, []).append(bar)
    for kind, bars in by_kind.items():
        spans = [(bar.start_us / 1e3, max(bar.duration_us, 1.2 * us_per_px) / 1e3) for bar in bars]
        edge = "white" if kind in "FB" else "none"
        axes.broken_barh(spans, (y, tall), facecolors=COLORS[kind], edgecolor=edge, linewidth=0.6, zorder=3)
    for bar in row.bars:
        if bar.kind in "FB" and bar.duration_us / us_per_px > 6.2 * len(bar.name) + 3:
            color = "white" if bar.kind == "B" else "black"
            axes.text((bar.start_us + bar.duration_us / 2) / 1e3, y + tall / 2, bar.name, ha="center", va="center", fontsize=7.5, color=color, zorder=4)


def _said(row: Row) -> str:
    """What the row adds up to, for the right margin."""
    if row.lane == "thread":
        return f"exposed {row.total_us('wait') / 1e3:.2f} ms, issue {row.total_us('issue') / 1e3:.2f} ms"
    return f"{len(row.bars)} x, {row.total_us(row.lane) / 1e3:.2f} ms"


def _legend(figure, drawn: list[Panel]) -> None:
    from matplotlib.patches import Patch

    used = {bar.kind for panel in drawn for row in panel.rows for bar in row.bars}
    handles = [Patch(facecolor=COLORS[kind], label=meaning) for kind, meaning in MEANING.items() if kind in used]
    figure.legend(handles=handles, loc="lower center", ncols=min(len(handles), 6), fontsize=9, frameon=False)


def events_of(report: Report) -> dict[str, list[Event]]:
    """The drawn iterations by name, for the overlay."""
    windows = representatives(report)
    return {
        "scheduled, simulated": report.simulated["scheduled"], "scheduled, measured": windows["scheduled"].events,
        "stock, simulated": report.simulated["stock"], "stock, measured": windows["stock"].events,
    }  # fmt: skip
