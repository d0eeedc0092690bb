"""A picture of peers.json: iteration time, what of it is exposed, and whole parameters. Part of peers.py."""

from pathlib import Path

COLOURS = {True: "#1f77b4", False: "#b0b0b0"}


def draw(result: dict, path: Path) -> None:
    """Write the picture to ``path``: bars of time on the left, bytes on the right, a row a layout."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    layouts = list(dict.fromkeys(row["layout"] for row in result["rows"]))
    counts = [sum(row["layout"] == layout for row in result["rows"]) for layout in layouts]
    figure = Figure(figsize=(12, 1.8 + 0.42 * sum(counts)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(layouts), 2, squeeze=False, height_ratios=counts, width_ratios=(2, 1), sharex="col")
    for (times, memory), layout in zip(axes, layouts):
        rows = [row for row in result["rows"] if row["layout"] == layout][::-1]
        places, colours = range(len(rows)), [COLOURS[row["ours"]] for row in rows]
        medians = [row["iteration_us"]["median_us"] / 1e3 for row in rows]
        spread = [
            [(row["iteration_us"]["median_us"] - row["iteration_us"]["p10_us"]) / 1e3 for row in rows],
            [(row["iteration_us"]["p90_us"] - row["iteration_us"]["median_us"]) / 1e3 for row in rows],
        ]
        times.barh(places, medians, color=colours, xerr=spread, error_kw={"elinewidth": 1, "ecolor": "#444444"})
        times.barh(
            places,
            [row["exposed_us"]["median_us"] / 1e3 for row in rows],
            color="#d62728",
            height=0.35,
            label="exposed: waits for parameters",
        )
        times.set_yticks(places, [f"{row['title']}  [{row['keeps']}]" for row in rows], fontsize=8)
        times.set_title(
            {"pp2": "PP 2 x VP 2 x DP 2", "dp4": "DP 4", "dp4-bf16": "DP 4, bfloat16, optimizer on the host"}.get(
                layout, layout
            ),
            fontsize=10,
        )
        memory.barh(places, [row["whole_peak_bytes"] / 1e6 for row in rows], color=colours)
        memory.set_yticks([])
    axes[-1][0].set_xlabel("iteration, ms: median, p10 to p90 (blue: ours)")
    axes[-1][1].set_xlabel("whole parameters on a rank at most, MB")
    axes[0][0].legend(fontsize=8, loc="lower right")
    options = result["options"]
    figure.suptitle(
        f"Peers on one GPT: {options['layers']} layers, hidden {options['hidden']}, four processes on "
        f"{result['about']['processors']} processors (gloo), load {result['about']['load_before']:.1f} at start",
        fontsize=10,
    )
    figure.savefig(path, dpi=130)
