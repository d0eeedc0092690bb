"""Pictures of results: beside every JSON of benchmarks/results that has one, a PNG of its name.

    python benchmarks/pictures.py [RESULT.json ...]

Benchmarks draw their own when they have written their result; this draws all of them again.
"""

import sys
from pathlib import Path

from megatron_ext.formats import json_files

RESULTS = Path(__file__).parent / "results"
OURS, LIGHT, OTHER, BAD = "#1f77b4", "#a6cbe8", "#b0b0b0", "#d62728"


def figure_of(width: float, height: float, rows: int = 1, columns: int = 1, **more):
    """A figure that needs no display, and its axes as a list."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, list(figure.subplots(rows, columns, squeeze=False, **more).flat)


def spread_ms(summaries: list[dict]) -> tuple[list[float], list[list[float]]]:
    """Medians, and distances to the 10th and 90th percentile, in milliseconds."""
    medians = [s["median_us"] / 1e3 for s in summaries]
    return medians, [
        [m - s["p10_us"] / 1e3 for m, s in zip(medians, summaries)],
        [s["p90_us"] / 1e3 - m for m, s in zip(medians, summaries)],
    ]


def emulated_cluster(result: dict):
    """Bars by policy, one picture a rate: measured, what of it is exposed, predicted, and the proven bound; the last
    two by the cost table, in whose minutes the machine may have had another speed, and by compute interleaved with the
    runs."""
    figure, axes = figure_of(4.2 * len(result["rates"]) + 1, 4.2, 1, len(result["rates"]))
    for axis, rate in zip(axes, result["rates"]):
        rows = rate["rows"]
        places, (medians, distances) = range(len(rows)), spread_ms([row["iteration_us"] for row in rows])
        colours = [OURS if row["policy"].startswith("hybrid") else OTHER for row in rows]
        axis.bar(places, medians, color=colours, yerr=distances, error_kw={"elinewidth": 1, "ecolor": "#444444"})
        axis.bar(
            places,
            [row["exposed_us"]["median_us"] / 1e3 for row in rows],
            width=0.4,
            color=BAD,
            label="exposed: waits for parameters",
        )
        axis.plot(places, [row["predicted_us"] / 1e3 for row in rows], "kx", label="predicted by the table")
        axis.plot(
            places,
            [median * (1 + row["prediction_error_interleaved"]) for row, median in zip(rows, medians)],
            "k+",
            markersize=9,
            label="predicted by compute interleaved",
        )
        bounds = [row["lower_bound_us"] / 1e3 for row in rows if row.get("lower_bound_us")]
        if bounds:
            axis.axhline(max(bounds), color="black", linestyle=":", linewidth=1, label="lower bound by the table")
        proven = [
            (place, median / (1 + row["over_bound_interleaved"]))
            for place, row, median in zip(places, rows, medians)
            if "over_bound_interleaved" in row
        ]
        if proven:
            axis.plot(*zip(*proven), "k_", markersize=22, label="lower bound by compute interleaved")
        axis.set_xticks(places, [f"{row['policy']}\n{row['ratio']:.3f}" for row in rows], fontsize=7)
        axis.set_title(f"{rate['gbit_s']:g} Gbit/s", fontsize=10)
    axes[0].set_ylabel("iteration, ms: median, p10 to p90")
    figure.legend(
        *axes[0].get_legend_handles_labels(), fontsize=8, loc="outside lower center", ncols=min(len(axes) + 1, 3)
    )
    options, narrow = result["options"], "\n" if len(result["rates"]) == 1 else " "
    figure.suptitle(
        f"Emulated cluster, {options['nodes']} nodes x {options['per_node']} ranks, PP {options['pp']}, zero stage "
        f"{options['zero_stage']}:{narrow}"
        f"measured over shaped links; below the names: ratio to {result['rates'][0]['rows'][0]['baseline']}",
        fontsize=9,
    )
    return figure


def main_job(result: dict):
    """Stock beside scheduled: iteration, thread's time in gathers, what of it is exposed."""
    figure, axes = figure_of(9, 3.6, 1, 3)
    titles = {
        "iteration_time_us": "iteration, ms",
        "gather_us": "thread's time in gathers, ms",
        "exposed_us": "of it exposed, ms",
    }
    for axis, (name, title) in zip(axes, titles.items()):
        medians, distances = spread_ms([result["times"][kind][name] for kind in ("stock", "scheduled")])
        axis.bar((0, 1), medians, color=[OTHER, OURS], yerr=distances, error_kw={"elinewidth": 1, "ecolor": "#444444"})
        if name == "iteration_time_us":
            axis.plot(
                (0, 1),
                [result["predicted_iteration_time_us"][kind] / 1e3 for kind in ("stock", "scheduled")],
                "kx",
                label="predicted",
            )
            axis.legend(fontsize=8, loc="lower right")
        axis.set_xticks((0, 1), ("stock", "scheduled"))
        axis.set_title(f"{title}\nratio {result['ratio_scheduled_to_stock'][name]:.3f}", fontsize=9)
    return figure


def hot_path(result: dict):
    """Our Python, and what it calls of torch, beside Megatron's pre-hooks."""
    figure, (axis,) = figure_of(8, 3)
    rows = {name: row for name, row in result.items() if isinstance(row, dict) and "us_per_parameter_and_step" in row}
    whole = [row["us_per_parameter_and_step"] for row in rows.values()]
    own = [row.get("own_us_per_parameter_and_step", 0) for row in rows.values()]
    places = range(len(rows))
    axis.barh(places, whole, color=[OTHER if name.startswith("Megatron") else LIGHT for name in rows])
    axis.barh(places, own, color=OURS)
    axis.axvline(0.1, color="black", linestyle=":", linewidth=1)
    axis.set_yticks(places, list(rows), fontsize=8)
    for place, us, ours in zip(places, whole, own):
        axis.annotate(f" {us:.3f}" + (f", ours {ours:.3f}" if ours else ""), (us, place), va="center", fontsize=7)
    axis.set(
        xlim=(0, max(whole) * 1.3),
        xlabel="us a parameter and step: our Python, lighter what it calls of torch (dotted: 0.1)",
    )
    return figure


def host_step(result: dict):
    """Share of plain memory traffic, with quartiles; and seconds for a GiB of pages."""
    rows = [
        (f"{case.partition(':')[0]}, {one['threads']} threads: {who}", row)
        for case, found in result["step"].items()
        for one in found
        for who, row in one["rows"].items()
        if who != "plain loop"
    ]
    figure, (shares, pages) = figure_of(11, 1 + 0.25 * len(rows), 1, 2)
    values = [row["share"] for _, row in rows]
    low, high = zip(*(row["share_quartiles"] for _, row in rows))
    spread = [[v - a for v, a in zip(values, low)], [b - v for v, b in zip(values, high)]]
    colours = [OURS if text.endswith(": step") else LIGHT if "by tensor" in text else OTHER for text, _ in rows]
    shares.barh(range(len(rows)), values, xerr=spread, color=colours, error_kw={"elinewidth": 1, "ecolor": "#444444"})
    shares.axvline(0.8, color="black", linestyle=":", linewidth=1)
    shares.set_yticks(range(len(rows)), [text for text, _ in rows], fontsize=7)
    shares.set_xlabel("bytes/s to those of a plain loop (dotted: 0.8)")
    made = result["pages"]["s_per_gib"]
    pages.barh(range(len(made)), [row["s"] for row in made.values()], color=LIGHT)
    pages.set_yticks(range(len(made)), list(made), fontsize=7)
    pages.set_xlabel("s to make 1 GiB of pages")
    return figure


def planner_suite(result: dict):
    """By row: gain over all-gathers, and how far the plan is from the proven bound."""
    rows = result["rows"]
    figure, (gains, gaps) = figure_of(11, 1 + 0.22 * len(rows), 1, 2, sharey=True)
    places = range(len(rows))
    gains.barh(places, [100 * row["gain_on_table"] for row in rows], color=OURS)
    gains.set_yticks(
        places, [f"{row['shape']}, {row['machine']}, zero {row['zero_stage']}" for row in rows], fontsize=7
    )
    gains.invert_yaxis()
    gains.set_xlabel("SIMULATED gain over stock, at zero 3 over all-gathers alone, %")
    gaps.barh(places, [100 * row["gap"] for row in rows], color=OTHER)
    gaps.set_xlabel("plan above the proven lower bound, %")
    return figure


def exact_gaps(result: dict):
    """Gaps of the hybrid policy to the exact one, sorted."""
    figure, (axis,) = figure_of(7, 3.2)
    gaps = sorted(100 * row["gap"] for row in result["rows"])
    axis.step(range(len(gaps)), gaps, where="post", color=OURS)
    axis.set(
        xlabel="random small cases, sorted",
        ylabel="hybrid over exact, %",
        title=f"mean {100 * result['summary']['mean_gap']:.3f} %, worst {100 * result['summary']['worst_gap']:.2f} %",
    )
    return figure


def fit_truth(result: dict):
    """Iteration times of the chosen setting over the best of all, sorted."""
    figure, (axis,) = figure_of(7, 3.2)
    ratios = sorted(100 * (row["ratio"] - 1) for row in result["rows"] if row["ratio"] is not None)
    axis.step(range(len(ratios)), ratios, where="post", color=OURS)
    title = f"{result['agree']} of {result['cases']} within 1 %"
    axis.set(xlabel="small cases, sorted", ylabel="chosen over the best of all, %", title=title)
    return figure


def verdict(result: dict):
    """Intervals of gains beside the gain that is true, or was measured, sorted by it; coloured by the answer."""
    figure, (axis,) = figure_of(7, 3.6)
    true = "true_gain" if "true_gain" in result["rows"][0] else "measured_gain"
    rows = sorted(result["rows"], key=lambda row: row[true])
    colours = {"helps": OURS, "does not help": "tab:red", "cannot tell": "0.75"}
    for answer, colour in colours.items():
        places = [place for place, row in enumerate(rows) if row["answer"] == answer]
        low, high = ([100 * rows[place][end] for place in places] for end in ("gain_low", "gain_high"))
        axis.vlines(places, low, high, color=colour, lw=2, label=f"{answer} ({len(places)})")
    axis.plot(range(len(rows)), [100 * row[true] for row in rows], "k.", ms=4, label=true.replace("_", " "))
    axis.axhline(1, color="0.4", lw=0.8, ls=":")
    axis.set(xlabel="cases, sorted", ylabel="gain, %")
    axis.set_ylim(max(-60, axis.get_ylim()[0]), None)
    axis.legend(fontsize=7)
    return figure


def parity(result: dict):
    """How often each choice was drawn; the title says how many cases were equal and how many controls were seen."""
    drawn = [
        (f"{key}: {value or 'none'}", count)
        for key, counts in result["drawn"].items()
        for value, count in counts.items()
    ]
    figure, (axis,) = figure_of(8, 1 + 0.2 * len(drawn))
    axis.barh(range(len(drawn)), [count for _, count in drawn], color=OURS if not result["different"] else BAD)
    axis.set_yticks(range(len(drawn)), [label for label, _ in drawn], fontsize=7)
    axis.invert_yaxis()
    axis.set_xlabel("cases")
    figure.suptitle(
        f"{result['equal']} of {result['cases']} cases bitwise equal, {result['controls_seen']} of "
        f"{result['controls']} negative controls seen",
        fontsize=9,
    )
    return figure


def patched_iteration_time(result: dict):
    """Iteration time to the unpatched checkout's by round: patched without the flag, and the unpatched one once
    more."""
    figure, (axis,) = figure_of(6, 3.4)
    for place, (kind, colour) in enumerate((("patched", OURS), ("control", OTHER))):
        ratios = [row[kind] for row in result["rounds"]]
        axis.scatter([place] * len(ratios), ratios, color=colour)
        axis.plot((place - 0.2, place + 0.2), [result["ratio"][kind]["median"]] * 2, color="black")
    axis.axhline(1, color="black", linestyle=":", linewidth=1)
    axis.set_xticks((0, 1), ("patched, no flag", "unpatched again"))
    axis.set(xlim=(-0.6, 1.6), ylabel="iteration time to unpatched, a round each\n(line: median)")
    axis.set_title(f"{result['release']}, losses {'equal' if result['losses_equal'] else 'DIFFER'}", fontsize=9)
    return figure


def endurance(result: dict):
    """What a rank holds early and late in the run."""
    units = {
        "anonymous_bytes": ("anonymous memory, MiB", 2**20),
        "open_files": ("open files", 1),
        "threads": ("threads", 1),
    }
    figure, axes = figure_of(10, 3.2, 1, len(units))
    for axis, (name, (title, unit)) in zip(axes, units.items()):
        for shift, when, colour in ((-0.2, "early", OTHER), (0.2, "late", OURS)):
            axis.bar(
                [rank + shift for rank in range(len(result["ranks"]))],
                [rank[name][when] / unit for rank in result["ranks"]],
                width=0.4,
                color=colour,
                label=when,
            )
        axis.set_title(title, fontsize=9)
        axis.set(xticks=range(len(result["ranks"])), xlabel="rank")
    axes[0].legend(fontsize=8, loc="lower right")
    figure.suptitle(f"{result['iterations']} iterations", fontsize=9)
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
    inputs.legend(fontsize=7)
    by_point: dict[str, list[dict]] = {}
    for row in result.get("kills", {}).get("by signal and point", ()):
        by_point.setdefault(f"{row['signal']} at the {row['point']}", []).append(row)
    rows = [(name, sum(row["faults"] for row in of), sum(row["wrong"] for row in of)) for name, of in by_point.items()]
    for part in ("network", "disk", "clock", "jobs"):
        names = sorted({row["what"] for row in result.get(part, ())})
        chosen = [[row for row in result[part] if row["what"] == name] for name in names]
        rows += [(name, len(of), sum(not row["as expected"] for row in of)) for name, of in zip(names, chosen)]
    names, counts, bad = zip(*reversed(rows)) if rows else ((), (), ())
    faults.barh(names, counts, color=OURS, label="faults")
    faults.barh(names, bad, color=BAD, label="not as expected")
    faults.set_title("faults and disturbances of runs", fontsize=9)
    faults.legend(fontsize=7)
    for axis in (inputs, faults):
        axis.tick_params(labelsize=7)
    return figure


def strict_device(result: dict):
    """How each ordering of the runtime that was taken away was seen, and how many were not."""
    figure, (axis,) = figure_of(7, 2.6)
    rows = [
        *result["seen_by"].items(),
        ("not seen", len(result["unseen"])),
        ("not reached", len(result["not_reached"])),
    ]
    names, counts = zip(*reversed(rows))
    bars = axis.barh(
        names, counts, color=[BAD if name == "not seen" else LIGHT if name == "not reached" else OURS for name in names]
    )
    axis.bar_label(bars, fontsize=7)
    axis.set_xlabel(f"of {result['orderings']} events, waits, records and flags, each taken away")
    return figure


COLOURS = {
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
    figure, axes = figure_of(4.2 * wide, 3.4 * high, high, wide)
    for axis, (size, count) in zip(axes, panels):
        rows = [row for row in result["rows"] if (row["size"], row["micro_batches"]) == (size, count)]
        for line, mark in zip(dict.fromkeys(row["line"] for row in result["rows"]), "sovD^"):
            own = sorted((row for row in rows if row["line"] == line), key=lambda row: row["device_peak_bytes"])
            x, y = [row["device_peak_bytes"] / 1e9 for row in own], [row["iteration_ms"] for row in own]
            axis.plot(x, y, marker=mark, label=line, color=COLOURS[line])
            if line == "ours":
                predicted = [row["predicted_iteration_ms"] for row in own]
                axis.plot(x, predicted, marker=mark, linestyle=":", color=LIGHT, label="ours, predicted")
        axis.set_title(f"{size}, {count} micro-batch{'es' if count > 1 else ''}", fontsize=9)
        axis.set_xlim(left=0)
        axis.set_ylim(bottom=0)
        axis.set_xlabel("device, GB")
        axis.set_ylabel("iteration, ms")
        axis.grid(alpha=0.3)
    axes[0].legend(fontsize=7)
    return figure


def device_limits(result: dict):
    """Iteration time over device memory in all, a line a layout; bill to census; losses beside stock's."""
    figure, (times, bills, losses) = figure_of(12, 3.6, 3)
    for layout, colour in zip(("pp2", "dp4", "one"), (OURS, "tab:orange", "tab:green")):
        rows = [row for row in result["rows"] if row["layout"] == layout and "device_bytes" in row]
        if not rows:
            continue
        stock = next(row for row in result["rows"] if row["layout"] == layout and row["limit"] == "stock")
        held = [row["device_bytes"] / 1e6 for row in rows]
        times.plot(
            held, [row["iteration_us"]["median_us"] / 1e3 for row in rows], "o-", color=colour, label=f"{layout}, ours"
        )
        times.plot(
            sum(stock["bill"].values()) / 1e6,
            stock["iteration_us"]["median_us"] / 1e3,
            "s",
            color=colour,
            mfc="none",
            label=f"{layout}, stock Megatron",
        )
        pairs = [(size, ratio) for row, size in zip(rows, held) for ratio in row["bill_to_census"]]
        bills.plot([size for size, _ in pairs], [100 * (ratio - 1) for _, ratio in pairs], "o", color=colour)
    times.set(xlabel="device bytes of the fullest rank at the peak, MB", ylabel="iteration, ms")
    times.legend(fontsize=7)
    bills.axhspan(-2, 2, color="0.9")
    bills.set(xlabel="device bytes, MB", ylabel="bill above census, %", ylim=(-4, 4))
    if result["losses"]:
        for name in ("stock", "sharded"):
            losses.plot(result["losses"][name], label=f"gradients: {name}", ls="-" if name == "stock" else "--")
        losses.set(xlabel="iteration", ylabel="loss, float32")
        losses.legend(fontsize=7)
    return figure


def delayed_update(result: dict):
    """Losses beside each other, means of 20 iterations; what the host does in an iteration, hidden or not."""
    measured = result["step"]
    figure, (losses, *steps) = figure_of(10 if measured else 6, 3.8, 1, 2 if measured else 1)
    shades = {"at once": OTHER, "after 50": OURS, "from the first": BAD}
    for row in result["losses"]:
        for name, values in row["loss"].items():
            means = [sum(values[i - 20 : i]) / 20 for i in range(20, len(values) + 1)]
            label = f"updates {'at once' if name == 'at once' else 'delayed ' + name}"
            first = row is result["losses"][0]
            losses.plot(range(20, len(values) + 1), means, color=shades[name], lw=1, label=label if first else None)
    losses.set(xlabel="iteration", ylabel="loss", title=f"{len(result['losses'])} seeds, the same batches for each")
    losses.legend(fontsize=8)
    for step in steps:
        for place, part in enumerate(("host_us", "exposed_us")):
            left = 0.0
            for name, us in measured[part].items():
                step.barh(place, us / 1e3, left=left / 1e3, color=(OURS, BAD)[place], ec="white")
                if us > 0.05 * sum(measured["host_us"].values()):
                    step.text((left + us / 2) / 1e3, place, name, ha="center", va="center", fontsize=8)
                left += us
        step.set_yticks([0, 1], ["the host's work", "the training\nthread waits"])
        step.set(xlabel=f"ms of an iteration of {measured['iteration_us']['delayed'] / 1e3:.0f} ms")
    return figure


def states_on_drive(result: dict):
    """Rates by slice; iteration times beside ZeRO-Infinity's; where the bytes of the larger model were."""
    figure, (rates, times, places) = figure_of(12, 3.6, 1, 3)
    rows = result.get("rate", {}).get("slices", [])
    for name, colour, title in (("plain", OTHER, "plain reader and writer"), ("steps", OURS, "steps of the optimizer")):
        rates.plot([row[name] / 1e6 for row in rows], "o-", color=colour, label=title)
    rates.set(xlabel="time slice", ylabel="MB/s, reads and writes", ylim=(0, None))
    rates.legend(fontsize=7)
    rounds = result.get("infinity", {}).get("rounds", [])
    for name, colour, title in (("ours", OURS, "ours"), ("infinity", OTHER, "ZeRO-Infinity")):
        seconds = [us / 1e6 for row in rounds for us in row[name]["iteration_us"]]
        times.plot(seconds, "o-", color=colour, label=title)
    times.set(xlabel="iteration, warm-up left out", ylabel="s", ylim=(0, None))
    times.legend(fontsize=7)
    if larger := result.get("larger"):
        sizes = {
            "memory of\nthe machine": larger["memory_bytes"],
            "states on\nthe drive": larger["states_bytes"],
            "held by\nthe process": larger["most_resident_bytes"],
        }
        places.bar(range(3), [size / 2**30 for size in sizes.values()], color=(OTHER, OURS, OURS))
        places.set_xticks(range(3), list(sizes), fontsize=8)
        places.set(ylabel="GiB", title=f"{larger['parameters'] / 1e9:.2f}B parameters")
    return figure


PICTURES = {
    function.__name__: function
    for function in (
        emulated_cluster,
        main_job,
        hot_path,
        host_step,
        planner_suite,
        exact_gaps,
        fit_truth,
        verdict,
        parity,
        device_limits,
        delayed_update,
        patched_iteration_time,
        endurance,
        robustness,
        strict_device,
        gpu_offload,
        states_on_drive,
    )
}


def draw(path: str | Path) -> Path | None:
    """Draw the picture of the result at ``path`` beside it; None where its kind has none."""
    path = Path(path)
    name = next((name for name in PICTURES if path.stem.startswith(name)), None)
    if name is None:
        return None
    out = path.with_suffix(".png")
    PICTURES[name](json_files.load(path, dict)).savefig(out, dpi=120)
    return out


if __name__ == "__main__":
    for given in [Path(argument) for argument in sys.argv[1:]] or sorted(RESULTS.glob("*.json")):
        drawn = draw(given)
        if drawn is not None:
            print(drawn)
