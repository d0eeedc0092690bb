"""The picture of one pipeline iteration: simulated above measured, on one time scale."""

from megatron_ext.formats import picture
from megatron_ext.formats.trace import END_NOT_KNOWN, WAITS
from megatron_ext.report.build_report import Report
from megatron_ext.report.parts import BACKWARD, FORWARD, part_of
from megatron_ext.report.timeline_panels import Panel, TimelineRow, panels, zoom_us

WIDTH_PX, DPI = 1600, 100

KINDS = {
    FORWARD: ("#b5d3ea", "forward step"),
    BACKWARD: ("#3f7fb5", "backward step"),
    "optimizer": ("#8c8c8c", "optimizer step"),
    "wait": ("#e31a1c", "exposed: waits for a gather"),
    "reduce_wait": ("#fb9a99", "waits for a reduce"),
    "issue": ("#1a1a1a", "thread issues gathers"),
    "gpu": ("#33a02c", "gather, route gpu (all-gather)"),
    "cpu": ("#ff7f00", "gather, route cpu (copy from host)"),
    "nvme": ("#6a3d9a", "drive: stage-ins, optimizer states"),
    "publish": ("#b15928", "publish to the host copy"),
    "reduce": ("#e7a6c8", "gradient reduction"),
    "host_step": ("#a98fd0", "host's step of a group"),
    "host_add": ("#d9c38c", "gradients added in host memory"),
    "p2p": ("#b9b9b9", "message between stages"),
}
"""Colour and meaning of every kind of bar."""

BETWEEN_ITERATIONS = "#f0f0e4"

THREAD_HEIGHT, LINK_HEIGHT, GAP = 1.0, 0.5, 0.35
"""Heights of rows, and the space between ranks, in the same unit."""

UNIT_INCH = 0.3

LEFT, RIGHT, ZOOM_FROM, WHOLE_TO = 0.07, 0.872, 0.66, 0.645
"""Places of the axes as shares of the picture's width. The larger view is to the right of the whole iteration."""

TITLE_TO, ITERATION_TIME = 0.8, 0.13
"""Shares of a panel's width: for its title followed by an iteration time, and for the iteration time alone."""

SHORTEST_PX = 1.2
"""A shorter interval is drawn with this width, so that it is visible."""

HATCH = "//////"
"""The hatch of gathers whose end is not known. They are drawn up to the end of the wait for them."""

STRIP = 0.45
"""A wait covers this share of the height of its step's bar, so that the step's name stays readable."""


def save(report: Report, path) -> None:
    """Write the picture as PNG, ``WIDTH_PX`` wide.

    Raises:
        InputError: ``path`` cannot be written.
    """
    # Use matplotlib without pyplot, which needs a window system and global state.
    from matplotlib.figure import Figure

    drawn = panels(report)
    heights = [_height(panel) * UNIT_INCH for panel in drawn]
    top, bottom, between = 1.05, 1.0, 0.5
    inches = top + bottom + sum(heights) + between * (len(drawn) - 1)
    figure = Figure(figsize=(WIDTH_PX / DPI, inches), dpi=DPI)
    whole = 1.01 * max(max(panel.step[1], panel.end_us()) for panel in drawn)
    zoom = zoom_us(drawn)
    y = inches - top
    for panel, height in zip(drawn, heights):
        y -= height
        to = RIGHT if zoom is None else WHOLE_TO
        axes = figure.add_axes((LEFT, y / inches, to - LEFT, height / inches))
        _draw(axes, panel, (0.0, whole), (to - LEFT) * WIDTH_PX)
        axes.set_title(panel.title, loc="left", fontsize=10.5, pad=5, fontweight="bold")
        _name_rows(axes, panel)
        last = axes
        if zoom is not None:
            last = figure.add_axes((ZOOM_FROM, y / inches, RIGHT - ZOOM_FROM, height / inches))
            begin = panel.first_gather_us()
            _draw(last, panel, (begin, begin + zoom), (RIGHT - ZOOM_FROM) * WIDTH_PX)
            last.set_title(f"{zoom / 1e3:.3g} ms from its first gather", loc="left", fontsize=9.5, pad=5)
        _sum_up_rows(last, panel)
        y -= between
    _write_words(figure, report, drawn, inches)
    picture.save(path, figure, dpi=DPI)


def _height(panel: Panel) -> float:
    ranks = len({row.rank for row in panel.rows})
    return sum(_tall(row) for row in panel.rows) + GAP * (ranks + 1)


def _tall(row: TimelineRow) -> float:
    return THREAD_HEIGHT if row.lane == "thread" else LINK_HEIGHT


def _places(panel: Panel):
    """Pairs of a row and the y of its lower edge, from the top."""
    y, rank = _height(panel), None
    for row in panel.rows:
        if row.rank != rank:
            y -= GAP
            rank = row.rank
        y -= _tall(row)
        yield row, y


def _draw(axes, panel: Panel, span_us: tuple[float, float], width_px: float) -> None:
    """Draw all bars of a panel in a span of time. The axis is in milliseconds."""
    from_us, until_us = span_us
    us_per_px = (until_us - from_us) / width_px
    height = _height(panel)
    axes.set_xlim(from_us / 1e3, until_us / 1e3)
    axes.set_ylim(0, height)
    for row, y in _places(panel):
        _draw_row(axes, row, y + 0.04, _tall(row) - 0.08, span_us, us_per_px)
    begin, end = panel.step
    if begin > from_us:
        axes.axvspan(from_us / 1e3, begin / 1e3, color=BETWEEN_ITERATIONS, zorder=0)
    if from_us < end < until_us:
        axes.axvline(end / 1e3, color="black", linewidth=1, linestyle="--")
        # The title is on the left. If the iteration ends below it, the time is written to the right of both.
        late = end > TITLE_TO * until_us
        place_us = end if late else max(end, (TITLE_TO - ITERATION_TIME) * until_us)
        how = {"xycoords": "data", "ha": "right" if late else "left", "va": "bottom", "fontsize": 10}
        _write(axes, f"iteration time {(end - begin) / 1e3:.1f} ms", place_us / 1e3, height, (3, 4), **how)
    axes.set_yticks([])
    axes.tick_params(axis="x", labelsize=8)
    axes.grid(axis="x", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


def _draw_row(axes, row: TimelineRow, y: float, tall: float, span_us: tuple[float, float], us_per_px: float) -> None:
    from_us, until_us = span_us
    by_kind: dict[tuple[str, bool], list] = {}
    for bar in row.bars:
        if bar.start_us < until_us and bar.end_us >= from_us:
            by_kind.setdefault((part_of(bar), bar.name != END_NOT_KNOWN), []).append(bar)
    for (kind, known), bars in by_kind.items():
        spans = [(bar.start_us / 1e3, max(bar.duration_us, SHORTEST_PX * us_per_px) / 1e3) for bar in bars]
        edge = "white" if kind in (FORWARD, BACKWARD) else "none"
        part = STRIP if kind in WAITS else 1.0
        style = dict(facecolors=KINDS[kind][0], edgecolor=edge)
        if not known:
            style = dict(facecolors="white", edgecolor=KINDS[kind][0], hatch=HATCH)
        axes.broken_barh(spans, (y, tall * part), linewidth=0.6, zorder=3, **style)
    for bar in row.bars:
        start, end = max(bar.start_us, from_us), min(bar.end_us, until_us)
        if bar.lane == "compute" and (end - start) / us_per_px > 6 * len(bar.name) + 2:
            color = "white" if part_of(bar) == BACKWARD else "black"
            place = (start + end) / 2e3, y + tall * 0.52
            _write(axes, bar.name, *place, zorder=4, xycoords="data", ha="center", fontsize=7.5, color=color)


def _write(axes, text: str, x: float, y: float, offset=(0, 0), **how) -> None:
    """Write ``text`` at a place. ``x`` is a share of the width; ``offset`` is in points from the place."""
    how = {"xycoords": axes.get_yaxis_transform(), "ha": "left", "va": "center", "fontsize": 8, **how}
    axes.annotate(text, (x, y), xytext=offset, textcoords="offset points", **how)


def _name_rows(axes, panel: Panel) -> None:
    for row, y in _places(panel):
        name, how = row.lane, {}
        if row.lane == "thread":
            name, how = f"rank {row.rank}", {"fontsize": 9.5, "fontweight": "bold"}
        _write(axes, name, -0.008, y + _tall(row) / 2, ha="right", **how)


def _sum_up_rows(axes, panel: Panel) -> None:
    """Write the sums of each row in the right margin."""
    for row, y in _places(panel):
        at_most = "" if all(bar.name != END_NOT_KNOWN for bar in row.bars) else "at most "
        said = f"{len(row.bars)} x, {at_most}{row.total_us(row.lane) / 1e3:.2f} ms"
        if row.lane == "thread":
            said = f"exposed {row.total_us('wait') / 1e3:.2f} ms\nissuing {row.total_us('issue') / 1e3:.2f} ms"
        _write(axes, said, 1, y + _tall(row) / 2, (8, 0), color="#333333")


def _write_words(figure, report: Report, drawn: list[Panel], inches: float) -> None:
    from matplotlib.patches import Patch

    parallel = report.run.workload.parallel
    title = (
        f"One training iteration at PP {parallel.pp} x VP {parallel.vp} x DP {parallel.data_parallel_size}, "
        f"{parallel.num_microbatches} micro-batches"
    )
    figure.text(0.01, 1 - 0.24 / inches, title, fontsize=14, fontweight="bold", va="center")
    how = (
        "One row per rank: its steps, named <stage><F or B><micro-batch>; white: it waits for a neighbouring stage. "
        "Below: the links that it uses. "
        "Milliseconds since the first rank had fresh parameters."
    )
    figure.text(0.01, 1 - 0.54 / inches, how, fontsize=9.5, va="center")
    bars = [bar for panel in drawn for row in panel.rows for bar in row.bars]
    used = {part_of(bar) for bar in bars}
    handles = [Patch(facecolor=color, label=meaning) for kind, (color, meaning) in KINDS.items() if kind in used]
    if any(bar.name == END_NOT_KNOWN for bar in bars):
        meaning = "gather whose end is not known"
        handles.append(Patch(facecolor="white", edgecolor=KINDS["gpu"][0], hatch=HATCH, label=meaning))
    if any(panel.step[0] for panel in drawn):
        handles.append(Patch(facecolor=BETWEEN_ITERATIONS, edgecolor="#cccccc", label="between iterations"))
    figure.legend(
        handles=handles,
        loc="lower center",
        ncols=min(len(handles), 6),
        fontsize=9.5,
        frameon=False,
        bbox_to_anchor=(0.5, 0.0),
    )
