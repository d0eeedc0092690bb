"""Write the table of docs/results.md from the kept results, so that every figure in it comes from a file.

    python benchmarks/results_page.py

Replaces what stands between the two markers of docs/results.md. ``tests/unit/benchmarks/test_results_page.py`` fails
where the page and the files differ, and where a kept result has no row.
"""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from megatron_ext.formats import json_files

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "results.md"
BEGIN, END = "<!-- begin: written by benchmarks/results_page.py -->", "<!-- end -->"

DISTURBED = ("network", "disk", "clock", "jobs")
HOOKS = "Megatron's pre-hooks"


class Row(NamedTuple):
    """What one result answers: ``figure`` reads the text of its figures from the loaded file."""

    question: str
    command: str
    figure: Callable[[dict], str]


def main_job(result: dict) -> str:
    time = result["ratio_scheduled_to_stock"]
    slices = result["iteration_time_of_slices"]
    equal = [row for row in result["equality"] if row["loss"] and row["grad_norm"] and row["parameter_sha256"]]
    return (
        f"iteration time {time['iteration_time_us']:.2f} ± {2 * slices['standard_error']:.2f}; "
        f"time in gathers {time['gather_us']:.2f}; exposed {time['exposed_us']:.3f}; "
        f"{len(equal)} of {len(result['equality'])} policies equal to the last bit"
    )


def simulated_clusters(result: dict) -> str:
    """Lowest and highest gain, over models, of the hybrid plan over the best plan that uses all-gathers alone."""
    gains: dict[int, dict[str, list[float]]] = {}
    for row in result["rows"]:
        of_stage = gains.setdefault(row["zero_stage"], {})
        of_stage.setdefault(row["title"], []).append(1 - row["hybrid_us"] / row["gathers_only_us"])
    texts = []
    for stage, found in gains.items():
        ranges = [
            f"{title} {ranging(of_models, '.0%')}" for title, of_models in found.items() if max(of_models) >= 5e-3
        ]
        others = f"the other {len(found) - len(ranges)} systems 0%"
        texts.append(f"zero stage {stage}: {'; '.join([*ranges, others])}")
    by_rate: dict[float, list[float]] = {}
    for point in result["picture"]:
        by_rate.setdefault(point["network_gb_s"], []).append(point["gain"])
    sizes = sorted({point["tokens"] for point in result["picture"]})
    at_rates = ", ".join(f"{rate:g} GB/s {ranging(found, '.0%')}" for rate, found in by_rate.items())
    texts.append(f"zero stage 3, one micro-batch of {sizes[0]} to {sizes[-1]} tokens, two nodes joined by: {at_rates}")
    return "**simulated** gain over the best plan that uses all-gathers alone: " + ". ".join(texts)


def ranging(values: list[float], form: str) -> str:
    """The lowest and the highest of ``values``; one figure if both read alike."""
    ends = [format(end, form) for end in (min(values), max(values))]
    return " to ".join(dict.fromkeys(ends))


def peers(result: dict) -> str:
    """Ratios of iteration times to those of other systems, and shares of Megatron's throughput, over micro-batches."""
    counts = sorted({row["microbatches"] for row in result["rows"]})
    ratios: dict[str, list[float]] = {}
    for row in result["rows"]:
        if row.get("opponent"):
            ratios.setdefault(row["title"], []).append(row["opponent"]["ratio"])
    of = ", ".join(map(str, counts))
    rounds = "one round" if result["options"]["rounds"] == 1 else f"{result['options']['rounds']} rounds"
    load = f"{rounds}, load {result['about']['load_before']:.0f} to {result['about']['load_most']:.0f}"
    said = "; ".join(f"{title} {ranging(found, '.2f')}" for title, found in ratios.items())
    text = f"{of} micro-batches, {load}. Our iteration time at no more bytes, to that of: {said}"
    return f"{text}. {throughput_kept(result['rows'])}"


def throughput_kept(rows: list[dict]) -> str:
    """Share of Megatron's throughput that our plans keep within 30 % of its device bytes, and that offloading peers
    keep."""
    shares: dict[str, list[tuple[float, float]]] = {}
    for count in sorted({row["microbatches"] for row in rows}):
        own = [row for row in rows if row["microbatches"] == count]
        stock = next((row for row in own if row["system"] == "stock"), None)
        if stock is None:
            continue
        chosen = [row for row in own if row["device_bytes"] <= 0.3 * stock["device_bytes"] and "opponent" not in row]
        best = min(chosen, key=lambda row: row["iteration_us"]["median_us"], default=None)
        peers = [row for row in own if row["system"].endswith("offload")]
        for row in ([] if best is None else [best]) + peers:
            kept = stock["iteration_us"]["median_us"] / row["iteration_us"]["median_us"]
            shares.setdefault(row["title"], []).append((kept, row["device_bytes"] / stock["device_bytes"]))
    texts = []
    for title, found in shares.items():
        kept, held = zip(*found)
        texts.append(f"{title} {ranging(kept, '.2f')} in {ranging(held, '.0%')}")
    return f"Share of Megatron's throughput kept, in what share of its device bytes: {'; '.join(texts)}"


def hot_path(result: dict) -> str:
    rows = result["rows"].values()
    own = [row["own_us_per_parameter_and_step"] for row in rows if "own_us_per_parameter_and_step" in row]
    return (
        f"{min(own):.2f} to {max(own):.2f} µs per parameter and step; "
        f"Megatron's own hooks {result['rows'][HOOKS]['us_per_parameter_and_step']:.1f}"
    )


def robustness(result: dict) -> str:
    kills, rows = result["kills"], [row for part in DISTURBED for row in result.get(part, ())]
    inputs = sum(row["inputs"] for row in result["fuzzing"].values())
    failures = sum(len(row["failures"]) for row in result["fuzzing"].values())
    return (
        f"{inputs:,} fuzzed inputs: {failures} tracebacks or hangs; {kills['faults']} faults in training: "
        f"{kills['hangs']} hangs, {kills['leftovers']} left something behind, the next start differed in "
        f"{kills['next start differs'] + kills['next start failed']}, the rank was named in {kills['rank named']} of "
        f"{kills['rank to be named']}; {sum(row['as expected'] for row in rows)} of {len(rows)} disturbances by "
        "network, disk, clock and other jobs as expected"
    )


def strict_device(result: dict) -> str:
    return (
        f"{result['cases'] - len(result['wrong'])} of {result['cases']} drawn cases without a report on a stand-in of "
        f"a CUDA device; {result['seen']} of {result['taken_away']} removed orderings are seen, "
        f"{len(result['not_reached'])} not reached"
    )


def verdict_truth(result: dict) -> str:
    summary = result["summary"]
    answers = ", ".join(f"{name} {count}" for name, count in sorted(summary["answers"].items()))
    return (
        f"**simulated** {answers} of {summary['cases']}; precision {summary['precision']:.0%}, recall "
        f"{summary['recall']:.0%} (of gains of 5 % {summary['recall_of_gains_of_5_percent']:.0%}, "
        f"of 10 % {summary['recall_of_gains_of_10_percent']:.0%}), "
        f"true gain in the 90 % interval in {summary['covered']:.0%}"
    )


def delayed_update(result: dict) -> str:
    """Loss with and without the delay, means over seeds."""
    rows = result["losses"]
    last = {name: sum(row["last"][name] for row in rows) / len(rows) for name in rows[0]["last"]}
    return (
        f"loss after {len(rows[0]['loss']['at once'])} iterations {last['at once']:.2f} with every update at once, "
        f"{last['after 50']:.2f} delayed after 50, {last['from the first']:.2f} from the first on"
    )


def planner_suite(result: dict) -> str:
    summary = result["summary"]
    return f"median {summary['median_gap']:.2%}, worst {summary['worst_gap']:.2%} of {summary['rows']} rows"


def parity(result: dict) -> str:
    seen = f"{result['controls_seen']} of {result['controls']} broken controls are seen"
    return f"{result['equal']} of {result['cases']} equal; {seen}"


def published_iterations(result: dict) -> str:
    """By kind of software."""
    return "**simulated** over published, median (10th to 90th percentile): " + "; ".join(
        f"{name}, {one['rows']} rows, {one['median']:.2f} ({one['p10']:.2f} to {one['p90']:.2f})"
        for name, one in result["summary"].items()
    )


def fit_truth(result: dict) -> str:
    return (
        f"**simulated** within 1 % in {result['agree']} of {result['cases']} small cases, worst "
        f"{result['worst_ratio'] - 1:.2%} of {result['compared']} in which something fits"
    )


def gpu_offload(result: dict) -> str:
    """The fastest row of every line, by size and number of micro-batches."""
    best: dict[tuple, dict] = {}
    for row in result["rows"]:
        key = row["size"], row["micro_batches"], row["line"]
        best[key] = min(best.get(key, row), row, key=lambda one: one["iteration_ms"])
    texts = [
        f"{size}, {count} micro-batches, {line}: {row['iteration_ms']:.0f} ms, {row['device_peak_bytes'] / 1e9:.1f} GB"
        for (size, count, line), row in best.items()
    ]
    return "; ".join([*texts, f"{len(result['left'])} more rows did not run"])


def gpu(result: dict) -> str:
    """Of all runs together: cases, and how predictions compare with what was measured."""
    every = {row["case"]: row for run in result["runs"] for row in run["results"]}
    cases = {name: row for name, row in every.items() if row["status"] != "could not try"}
    equal = [row for row in cases.values() if row["said"].endswith("equal to the last bit")]
    passed = [row for row in cases.values() if row["status"] == "pass"]
    timed = [row["figures"] for row in cases.values() if "predicted_iteration_ms" in row.get("figures", {})]
    ratios = sorted(row["predicted_iteration_ms"] / row["iteration_ms"] for row in timed)
    return (
        f"{len(passed)} of {len(cases)} cases pass, {len(every) - len(cases)} could not be tried; {len(equal)} "
        "trainings equal to the last bit; iteration time of "
        f"{len(timed)} plans predicted from the data sheet {ratios[0] - 1:+.0%} to {ratios[-1] - 1:+.0%}"
    )


ROWS = {
    "gpu": Row("Does a GPU train as stock Megatron does, to the last bit?", "bash scripts/test_gpu.sh", gpu),
    "gpu_offload": Row("How much time does offload cost on one GPU?", "benchmarks/gpu_offload.py", gpu_offload),
    "main_job": Row("Scheduled run compared with stock, on one node", "benchmarks/main_job.py runs/NAME", main_job),
    "parity": Row("Does every valid schedule train like Megatron, to the last bit?", "benchmarks/parity.py", parity),
    "simulated_clusters": Row(
        "On which known machines would a plan win?", "benchmarks/simulated_clusters.py", simulated_clusters
    ),
    "published_iterations": Row(
        "How close are predictions from data sheets alone to published iteration times?",
        "benchmarks/published_iterations.py",
        published_iterations,
    ),
    "peers": Row("Iteration times and device bytes of other systems", "benchmarks/peers.py --rounds 1", peers),
    "peers_slow_link": Row(
        "The same on two nodes over a slow link",
        "benchmarks/peers.py --gbit 2.5 --rounds 1 --micro-batches 4 --timeout 150",
        peers,
    ),
    "planner_suite": Row(
        "How far are plans of large models from the proven bound?", "benchmarks/planner_suite.py", planner_suite
    ),
    "verdict_truth": Row(
        "Is the verdict right if the cost table has 10 to 40 % of noise around a known true table?",
        "benchmarks/verdict_truth.py --first 900 --cases 60",
        verdict_truth,
    ),
    "fit_truth": Row(
        "Is what `fit` chooses the fastest of all settings, each planned in full?", "benchmarks/fit_truth.py", fit_truth
    ),
    "hot_path": Row("How much time of the training thread does our Python take?", "benchmarks/hot_path.py", hot_path),
    "robustness": Row(
        "Does it withstand bad input, kills and disturbances?",
        "sudo .venv/bin/python benchmarks/robustness.py --kills 204",
        robustness,
    ),
    "strict_device": Row(
        "Do tests see a missing event or wait on CUDA?",
        "benchmarks/strict_device.py --cases 300 --tries 8",
        strict_device,
    ),
    "delayed_update": Row(
        "How much does the delayed parameter update increase the loss?", "benchmarks/delayed_update.py", delayed_update
    ),
}


def table() -> str:
    """The markdown table; a result that is not kept has no row.

    Raises:
        KeyError: a kept result is not in ``ROWS``, or lacks a field that its row reads.
    """
    lines = ["| question | figure | date | command | file |", "|---|---|---|---|---|"]
    kept = {path.stem for path in RESULTS.glob("*.json")}
    for name in [*(name for name in ROWS if name in kept), *sorted(kept - set(ROWS))]:
        result = json_files.load(RESULTS / f"{name}.json", dict)
        row = ROWS[name]
        about = result.get("about", result)
        date = (about.get("date") or about["created_at"])[:10]
        lines.append(f"| {row.question} | {row.figure(result)} | {date} | `{row.command}` | `{name}.json` |")
    return "\n".join(lines)


def page(text: str) -> str:
    """``text`` of the page with the table written anew."""
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n{table()}\n{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
