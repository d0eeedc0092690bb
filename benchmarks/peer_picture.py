"""A picture of peers.json: iteration time over device bytes, one line a system. Part of peers.py."""

from pathlib import Path

MARKS = "osD^vPX*"


def draw(result: dict, path: Path) -> None:
    """Write the picture to ``path``: one panel for each number of micro-batches."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    counts = sorted({row["microbatches"] for row in result["rows"]})
    figure = Figure(figsize=(5.2 * len(counts), 4.8), layout="constrained")
    FigureCanvasAgg(figure)
    lines = list(dict.fromkeys(row["line"] for row in result["rows"]))
    for axes, count in zip(figure.subplots(1, len(counts), squeeze=False)[0], counts):
        for line, mark in zip(lines, MARKS):
            rows = [row for row in result["rows"] if row["line"] == line and row["microbatches"] == count]
            rows.sort(key=lambda row: row["device_bytes"])
            ours = line == "ours"
            axes.plot(
                [row["device_bytes"] / 1e6 for row in rows],
                [row["iteration_us"]["median_us"] / 1e3 for row in rows],
                marker=mark,
                label=line,
                color="#1f77b4" if ours else None,
                linewidth=2.5 if ours else 1.0,
                zorder=3 if ours else 2,
            )
        axes.set_title(f"{count} micro-batch{'es' if count > 1 else ''}", fontsize=10)
        axes.set_xlabel("device bytes of a rank without activations, MB")
        axes.set_ylim(bottom=0)
        axes.set_xlim(left=0)
        axes.grid(alpha=0.3)
    figure.axes[0].set_ylabel("iteration, ms")
    figure.axes[0].legend(fontsize=8)
    options, about = result["options"], result["about"]
    load = f"load {about['load_before']:.0f} to {about['load_most']:.0f}"
    rounds = "one round" if options["rounds"] < 2 else f"{options['rounds']} rounds"
    figure.suptitle(
        f"DP 4, {options['layers']} layers, hidden {options['hidden']}, bfloat16, gloo on {about['processors']} "
        f"processors, {load}, {rounds}",
        fontsize=10,
    )
    figure.savefig(path, dpi=130)
