"""Pictures of results: beside every JSON of benchmarks/results a PNG of its name.

    python benchmarks/pictures.py [RESULT.json ...]

Benchmarks draw their own when they have written their result; this draws all of them again.
"""

import sys
from pathlib import Path

from megatron_ext.formats import json_files

RESULTS = Path(__file__).parent / "results"
OURS, LIGHT, OTHER, BAD = "#1f77b4", "#a6cbe8", "#b0b0b0", "#d62728"
ERROR = {"elinewidth": 1, "ecolor": "#444444"}
MARKS = "osD^vPX*"


def figure_of(width: float, height: float, rows: int = 1, columns: int = 1, **more):
    """A figure that needs no display, and its axes as a list."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, list(figure.subplots(rows, columns, squeeze=False, **more).flat)


def sorted_gaps(percent: list[float], title: str, label: str):
    """A line through values in order, the smallest first."""
    figure, (axis,) = figure_of(7, 3.2)
    axis.step(range(len(percent)), sorted(percent), where="post", color=OURS)
    axis.set(xlabel="cases, sorted", ylabel=label, title=title)
    return figure


def time_over_bytes(axis, rows: list[dict], across: str, up: str, scales: tuple[float, float], colours: dict) -> None:
    """A line for each system (``row["line"]``): ``up`` over ``across``, divided by ``scales``."""
    for line, mark in zip(dict.fromkeys(row["line"] for row in rows), MARKS):
        own = sorted((row for row in rows if row["line"] == line), key=lambda row: row[across])
        x, y = ([row[name] / scale for row in own] for name, scale in zip((across, up), scales))
        axis.plot(x, y, marker=mark, label=line, color=colours.get(line), linewidth=2.5 if line == "ours" else 1)
    axis.set_xlim(left=0)
    axis.set_ylim(bottom=0)
    axis.grid(alpha=0.3)


def micro_batches(count: int) -> str:
    return f"{count} micro-batch{'es' if count > 1 else ''}"


def main_job(result: dict):
    """Stock beside scheduled: iteration, thread's time in gathers, what of it is exposed."""
    figure, axes = figure_of(9, 3.6, 1, 3)
    kinds = ("stock", "scheduled")
    titles = {
        "iteration_time_us": "iteration, ms",
        "gather_us": "thread's time in gathers, ms",
        "exposed_us": "of it exposed, ms",
    }
    for axis, (name, title) in zip(axes, titles.items()):
        middle, low, high = (
            [result["times"][kind][name][figure] / 1e3 for kind in kinds]
            for figure in ("median_us", "p10_us", "p90_us")
        )
        spread = [[m - a for m, a in zip(middle, low)], [b - m for m, b in zip(middle, high)]]
        axis.bar((0, 1), middle, color=[OTHER, OURS], yerr=spread, error_kw=ERROR)
        if name == "iteration_time_us":
            predicted = [result["predicted_iteration_time_us"][kind] / 1e3 for kind in kinds]
            axis.plot((0, 1), predicted, "kx", label="predicted")
            axis.legend(fontsize=8, loc="lower right")
        axis.set_xticks((0, 1), kinds)
        axis.set_title(f"{title}\nratio {result['ratio_scheduled_to_stock'][name]:.3f}", fontsize=9)
    return figure


def hot_path(result: dict):
    """Our Python, and what it calls of torch, beside Megatron's pre-hooks."""
    figure, (axis,) = figure_of(8, 3)
    rows = result["rows"]
    whole = [row["us_per_parameter_and_step"] for row in rows.values()]
    own = [row.get("own_us_per_parameter_and_step", 0) for row in rows.values()]
    places = range(len(rows))
    axis.barh(places, whole, color=[OTHER if name.startswith("Megatron") else LIGHT for name in rows])
    axis.barh(places, own, color=OURS)
    axis.axvline(0.1, color="black", linestyle=":", linewidth=1)
    axis.set_yticks(places, list(rows), fontsize=8)
    for place, us, ours in zip(places, whole, own):
        axis.annotate(f" {us:.3f}" + (f", ours {ours:.3f}" if ours else ""), (us, place), va="center", fontsize=7)
    label = "us a parameter and step: our Python, lighter what it calls of torch (dotted: 0.1)"
    axis.set(xlim=(0, max(whole) * 1.3), xlabel=label)
    return figure


def planner_suite(result: dict):
    """By row: gain over all-gathers, and how far the plan is from the proven bound."""
    rows = result["rows"]
    figure, (gains, gaps) = figure_of(11, 1 + 0.22 * len(rows), 1, 2, sharey=True)
    places = range(len(rows))
    gains.barh(places, [100 * row["gain_on_table"] for row in rows], color=OURS)
    names = [f"{row['shape']}, {row['machine']}, zero {row['zero_stage']}" for row in rows]
    gains.set_yticks(places, names, fontsize=7)
    gains.invert_yaxis()
    gains.set_xlabel("SIMULATED gain over stock, at zero 3 over all-gathers alone, %")
    gaps.barh(places, [100 * row["gap"] for row in rows], color=OTHER)
    gaps.set_xlabel("plan above the proven lower bound, %")
    return figure


def fit_truth(result: dict):
    """Iteration times of the chosen setting over the best of all, sorted."""
    ratios = [100 * (row["ratio"] - 1) for row in result["rows"] if row["ratio"] is not None]
    title = f"{result['agree']} of {result['cases']} within 1 %"
    return sorted_gaps(ratios, title, "chosen over the best of all, %")


def verdict_truth(result: dict):
    """Intervals of gains beside the true gain, sorted by it; coloured by the answer."""
    figure, (axis,) = figure_of(7, 3.6)
    rows = sorted(result["rows"], key=lambda row: row["true_gain"])
    for answer, colour in {"helps": OURS, "does not help": BAD, "cannot tell": "0.75"}.items():
        places = [place for place, row in enumerate(rows) if row["answer"] == answer]
        low, high = ([100 * rows[place][end] for place in places] for end in ("gain_low", "gain_high"))
        axis.vlines(places, low, high, color=colour, lw=2, label=f"{answer} ({len(places)})")
    axis.plot(range(len(rows)), [100 * row["true_gain"] for row in rows], "k.", ms=4, label="true gain")
    axis.axhline(1, color="0.4", lw=0.8, ls=":")
    axis.set(xlabel="cases, sorted", ylabel="gain, %")
    axis.set_ylim(max(-60, axis.get_ylim()[0]), None)
    axis.legend(fontsize=7)
    return figure


def parity(result: dict):
    """How often each choice was drawn; the title says how many cases were equal and how many controls were seen."""
    counts = {f"{key}: {value or 'none'}": n for key, own in result["drawn"].items() for value, n in own.items()}
    figure, (axis,) = figure_of(8, 1 + 0.2 * len(counts))
    axis.barh(list(counts), list(counts.values()), color=OURS if not result["different"] else BAD)
    axis.tick_params(axis="y", labelsize=7)
    axis.invert_yaxis()
    axis.set_xlabel("cases")
    seen = f"{result['controls_seen']} of {result['controls']} negative controls seen"
    figure.suptitle(f"{result['equal']} of {result['cases']} cases bitwise equal, {seen}", fontsize=9)
    return figure


def robustness(result: dict):
    """Inputs of every kind, faults by signal and point, and disturbances; what went wrong in red."""
    figure, (inputs, faults) = figure_of(11, 5.2, 1, 2)
    kinds = sorted({kind for row in result["fuzzing"].values() for kind in row["kinds"]}, reverse=True)
    left = [0] * len(kinds)
    for (engine, row), colour in zip(result["fuzzing"].items(), (LIGHT, OURS)):
        counts = [row["kinds"].get(kind, 0) for kind in kinds]
        inputs.barh(kinds, counts, left=left, color=colour, label=engine)
        left = [before + count for before, count in zip(left, counts)]
    failures = sum(len(row["failures"]) for row in result["fuzzing"].values())
    inputs.set_title(f"distinct inputs, {failures} tracebacks or hangs", fontsize=9)
    rows: dict[str, tuple[int, int]] = {}
    for row in result.get("kills", {}).get("by signal and point", ()):
        name = f"{row['signal']} at the {row['point']}"
        count, bad = rows.get(name, (0, 0))
        rows[name] = count + row["faults"], bad + row["wrong"]
    for row in (row for part in ("network", "disk", "clock", "jobs") for row in result.get(part, ())):
        count, bad = rows.get(row["what"], (0, 0))
        rows[row["what"]] = count + 1, bad + (not row["as expected"])
    names = list(reversed(rows))
    faults.barh(names, [rows[name][0] for name in names], color=OURS, label="faults")
    faults.barh(names, [rows[name][1] for name in names], color=BAD, label="not as expected")
    faults.set_title("faults and disturbances of runs", fontsize=9)
    for axis in (inputs, faults):
        axis.legend(fontsize=7)
        axis.tick_params(labelsize=7)
    return figure


def strict_device(result: dict):
    """How each ordering of the runtime that was taken away was seen, and how many were not."""
    figure, (axis,) = figure_of(7, 2.6)
    rows = {"not reached": len(result["not_reached"]), "not seen": len(result["unseen"])}
    rows |= dict(reversed(result["seen_by"].items()))
    colours = {"not seen": BAD, "not reached": LIGHT}
    bars = axis.barh(list(rows), list(rows.values()), color=[colours.get(name, OURS) for name in rows])
    axis.bar_label(bars, fontsize=7)
    axis.set_xlabel(f"of {result['orderings']} events, waits, records and flags, each taken away")
    return figure


GPU_COLOURS = {
    "ours": OURS,
    "Megatron": "black",
    "Megatron, optimizer on the host": OTHER,
    "FSDP2, CPU offload": BAD,
    "DeepSpeed ZeRO-3, CPU offload": "tab:orange",
}


def gpu_offload(result: dict):
    """Iteration time over device bytes, a panel for each size and number of micro-batches, a line for each system."""
    panels = list(dict.fromkeys((row["size"], row["micro_batches"]) for row in result["rows"]))
    high, wide = -(-len(panels) // 3), min(len(panels), 3)
    figure, axes = figure_of(max(4.2 * wide, 6.5), max(3.4 * high, 4), high, wide)
    for axis, (size, count) in zip(axes, panels):
        rows = [row for row in result["rows"] if (row["size"], row["micro_batches"]) == (size, count)]
        time_over_bytes(axis, rows, "device_peak_bytes", "iteration_ms", (1e9, 1), GPU_COLOURS)
        ours = sorted(
            (row["device_peak_bytes"], row["predicted_iteration_ms"]) for row in rows if row["line"] == "ours"
        )
        axis.plot([held / 1e9 for held, _ in ours], [ms for _, ms in ours], ":", color=LIGHT, label="ours, predicted")
        axis.set_title(f"{size}, {micro_batches(count)}", fontsize=9)
        axis.set(xlabel="device, GB", ylabel="iteration, ms", yscale="log")
        axis.autoscale(axis="y")
    axes[0].legend(fontsize=7)
    return figure


def gpu(result: dict):
    """What was predicted from the data sheet, to what was measured: iteration time and device bytes of each plan."""
    rows = {row["case"]: row["figures"] for run in result["runs"] for row in run["results"] if "figures" in row}
    planned = {case: row for case, row in rows.items() if "predicted_iteration_ms" in row}
    figure, (axis,) = figure_of(8, 0.5 + 0.4 * len(planned))
    names = [case.partition(": ")[2] for case in planned]
    for title, predicted, measured, colour in (
        ("iteration time", "predicted_iteration_ms", "iteration_ms", OURS),
        ("device bytes by the bill", "predicted_device_bytes", "device_peak_bytes", OTHER),
    ):
        axis.plot([row[predicted] / row[measured] for row in planned.values()], names, "o", color=colour, label=title)
    axis.axvline(1, color=LIGHT)
    axis.set(xlabel="predicted from the data sheet, to measured on one H200")
    axis.legend(fontsize=7)
    return figure


def peers(result: dict):
    """Iteration time over device bytes, a panel for each number of micro-batches, a line for each system."""
    counts = sorted({row["microbatches"] for row in result["rows"]})
    figure, axes = figure_of(5.2 * len(counts), 4.8, 1, len(counts))
    for axis, count in zip(axes, counts):
        rows = [
            row | {"median_us": row["iteration_us"]["median_us"]}
            for row in result["rows"]
            if row["microbatches"] == count
        ]
        time_over_bytes(axis, rows, "device_bytes", "median_us", (1e6, 1e3), {"ours": OURS})
        axis.set_title(micro_batches(count), fontsize=10)
        axis.set_xlabel("device bytes of a rank without activations, MB")
    axes[0].set_ylabel("iteration, ms")
    axes[0].legend(fontsize=8)
    options, about = result["options"], result["about"]
    figure.suptitle(
        f"DP 4, {options['layers']} layers, hidden {options['hidden']}, bfloat16, gloo on {about['processors']} "
        f"processors, load {about['load_before']:.0f} to {about['load_most']:.0f}, rounds: {options['rounds']}",
        fontsize=10,
    )
    return figure


def delayed_update(result: dict):
    """Losses side by side, means of 20 iterations."""
    figure, (axis,) = figure_of(6, 3.8)
    shades = {"at once": OTHER, "after 50": OURS, "from the first": BAD}
    for row in result["losses"]:
        for name, values in row["loss"].items():
            means = [sum(values[i - 20 : i]) / 20 for i in range(20, len(values) + 1)]
            label = f"updates {'at once' if name == 'at once' else 'delayed ' + name}"
            first = row is result["losses"][0]
            axis.plot(range(20, len(values) + 1), means, color=shades[name], lw=1, label=label if first else None)
    axis.set(xlabel="iteration", ylabel="loss", title=f"{len(result['losses'])} seeds, the same batches for each")
    axis.legend(fontsize=8)
    return figure


def published_iterations(result: dict):
    """Predicted over published time of every row, over the published time, a colour for each kind of software."""
    figure, (axis,) = figure_of(8, 4.5)
    for group in dict.fromkeys(row["group"] for row in result["rows"]):
        own = [row for row in result["rows"] if row["group"] == group]
        ratios = [row["predicted_s"] / row["published_s"] for row in own]
        axis.semilogx([row["published_s"] for row in own], ratios, ".", label=group)
    axis.axhline(1, color=OTHER, lw=1)
    axis.set(xlabel="published iteration time, s", ylabel="predicted / published", title="From data sheets (simulated)")
    axis.legend(fontsize=7, loc="lower right")
    return figure


def simulated_clusters(result: dict):
    """Gain over all-gathers alone: network rate across, micro-batch size up; every cell carries it in per cent."""
    points = result["picture"]
    gains = {(point["tokens"], point["network_gb_s"]): 100 * point["gain"] for point in points}
    tokens, rates = (sorted({key[place] for key in gains}) for place in (0, 1))
    figure, (axis,) = figure_of(8, 5.5)
    cells = [[gains[up, across] for across in rates] for up in tokens]
    image = axis.imshow(cells, origin="lower", aspect="auto", cmap="viridis", vmin=0)
    bright = 0.6 * max(max(gains.values()), 1)
    for y, row in enumerate(cells):
        for x, gain in enumerate(row):
            axis.text(x, y, f"{gain:.0f} %", ha="center", va="center", color="black" if gain > bright else "white")
    axis.set_xticks(range(len(rates)), [f"{rate:g}" for rate in rates])
    axis.set_yticks(range(len(tokens)), [str(count) for count in tokens])
    axis.set(xlabel="all-gather over two nodes, GB/s", ylabel="tokens of a micro-batch")
    axis.set_title(
        f"SIMULATED: iteration time that a hybrid plan saves over the best plan by all-gathers alone\n"
        f"{points[0]['model']}, zero stage {points[0]['zero_stage']}, 2 x 8 H100, costs from published figures"
    )
    figure.colorbar(image, label="gain, %")
    return figure


KINDS = (main_job, hot_path, planner_suite, fit_truth, verdict_truth, parity, robustness, strict_device)
KINDS += (gpu, gpu_offload, peers, delayed_update, simulated_clusters, published_iterations)
PICTURES = {function.__name__: function for function in KINDS}


def draw(path: str | Path) -> Path | None:
    """Draw the picture of the result at ``path`` beside it. None: the name begins like none that has a picture."""
    path = Path(path)
    name = max((kind for kind in PICTURES if path.stem.startswith(kind)), key=len, default=None)
    if name is None:
        return None
    out = path.with_suffix(".png")
    PICTURES[name](json_files.load(path, dict)).savefig(out, dpi=120)
    return out


if __name__ == "__main__":
    for given in [Path(argument) for argument in sys.argv[1:]] or sorted(RESULTS.glob("*.json")):
        print(draw(given))
