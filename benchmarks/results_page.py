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


class Row(NamedTuple):
    """What one result answers: ``figure`` reads the text of its figures from the loaded file."""

    question: str
    command: str
    figure: Callable[[dict], str]


def ratio(row: dict) -> str:
    """Iteration time to the baseline's, with two standard errors."""
    return (
        f"{row['ratio']:.2f} ± {2 * next(v for k, v in row.items() if k.startswith('ratio_of_'))['standard_error']:.2f}"
    )


def verdicts(summary: dict) -> str:
    """How often each answer was given, of how many."""
    answers = ", ".join(f"{name} {count}" for name, count in sorted(summary["answers"].items()))
    return f"{answers} of {summary.get('pairs') or summary['cases']}"


def cluster(result: dict) -> str:
    """Hybrid to its baseline, measured, at every rate; and how far the prediction by the cost table was off."""
    parts = []
    for rate in result["rates"]:
        row = next(row for row in rate["rows"] if row["policy"] == "hybrid")
        baseline = "stock" if row["baseline"] == "stock" else "the plan by all-gathers alone"
        parts.append(
            f"hybrid to {baseline} at {rate['gbit_s']:g} Gbit/s: {ratio(row)}, predicted "
            f"{row['prediction_error']:+.0%} off"
        )
    return "; ".join(parts)


def main_job(result: dict) -> str:
    time = result["ratio_scheduled_to_stock"]
    slices = next(result[name] for name in result if name.startswith("iteration_time_of_"))
    equal = [row for row in result["equality"] if row["loss"] and row["grad_norm"] and row["parameter_sha256"]]
    return (
        f"iteration time {time['iteration_time_us']:.2f} ± {2 * slices['standard_error']:.2f}; "
        f"time in gathers {time['gather_us']:.2f}; exposed {time['exposed_us']:.3f}; "
        f"{len(equal)} of {len(result['equality'])} policies equal to the last bit"
    )


def simulated_clusters(result: dict) -> str:
    """Gain of the hybrid plan over the best plan by all-gathers alone, lowest and highest of the models."""
    gains: dict[tuple[int, str], list[float]] = {}
    for row in result["rows"]:
        gains.setdefault((row["zero_stage"], row["title"]), []).append(1 - row["hybrid_us"] / row["gathers_only_us"])
    ranges = [
        f"zero stage {stage}, {title}: {min(found):.0%} to {max(found):.0%}" for (stage, title), found in gains.items()
    ]
    return "**simulated** gain over the best plan that uses all-gathers alone: " + "; ".join(ranges)


def peers(result: dict) -> str:
    """Device bytes of every system, with as many micro-batches as most ran with; and by peer the ratio of times."""
    counts = [row["microbatches"] for row in result["rows"]]
    most = max(sorted(set(counts)), key=counts.count)
    held = [f"{r['title']} {r['device_bytes'] / 1e6:.1f}" for r in result["rows"] if r["microbatches"] == most]
    text = f"MB on the device of a rank, {most} micro-batches: {'; '.join(held)}"
    rounds = "one round" if result["options"]["rounds"] == 1 else f"{result['options']['rounds']} rounds"
    load = f"{rounds}, load {result['about']['load_before']:.0f} to {result['about']['load_most']:.0f}"
    ratios = [
        f"{row['title']} {row['opponent']['ratio']:.2f} ({row['microbatches']})"
        for row in result["rows"]
        if row.get("opponent")
    ]
    text = f"{text}. Our iteration time at no more bytes, {load}, to that of (micro-batches): {'; '.join(ratios)}"
    return f"{text}. {throughput_kept(result['rows'])}"


def throughput_kept(rows: list[dict]) -> str:
    """Of Megatron's throughput, what ours keeps within 30 % of its device bytes, and what peers keep that offload."""
    texts = []
    for count in sorted({row["microbatches"] for row in rows}):
        own = [row for row in rows if row["microbatches"] == count]
        stock = next((row for row in own if row["system"] == "stock"), None)
        if stock is None:
            continue
        chosen = [row for row in own if row["device_bytes"] <= 0.3 * stock["device_bytes"] and "opponent" not in row]
        best = min(chosen, key=lambda row: row["iteration_us"]["median_us"], default=None)
        peers = [row for row in own if row["system"].endswith("offload")]
        kept = [
            f"{row['title']} {stock['iteration_us']['median_us'] / row['iteration_us']['median_us']:.2f} in "
            f"{row['device_bytes'] / stock['device_bytes']:.0%}"
            for row in ([] if best is None else [best]) + peers
        ]
        texts.append(f"{count} micro-batches: {', '.join(kept)}")
    return f"Share of Megatron's throughput kept, in what share of its device bytes: {'; '.join(texts)}"


def hot_path(result: dict) -> str:
    own = [row["own_us_per_parameter_and_step"] for row in result.values() if "own_us_per_parameter_and_step" in row]
    return (
        f"{min(own):.2f} to {max(own):.2f} µs a parameter and step; "
        f"Megatron's own hooks {result[HOOKS]['us_per_parameter_and_step']:.1f}"
    )


def host_step(result: dict) -> str:
    parts = []
    for name, cases in result["step"].items():
        for case in cases:
            row = case["rows"]["step"]
            low, high = row["share_quartiles"]
            parts.append(
                f"{name}, {case['threads']} threads: {row['share_of_least']:.2f} by least times, {row['share']:.2f} "
                f"({low:.2f} to {high:.2f}) by round"
            )
    made = {name: row["least_s"] for name, row in result["pages"]["s_per_gib"].items()}
    return (
        f"of a plain loop's bytes/s: {'; '.join(parts)}; 1 GiB of pages {made['as a run makes them']:.2f} s, a plain "
        f"loop {made['plain loop']:.2f} s (least times)"
    )


def endurance(result: dict) -> str:
    grown = max(rank["anonymous_bytes"]["late"] / rank["anonymous_bytes"]["early"] - 1 for rank in result["ranks"])
    files = max(rank["open_files"]["late"] - rank["open_files"]["early"] for rank in result["ranks"])
    threads = max(rank["threads"]["late"] - rank["threads"]["early"] for rank in result["ranks"])
    saves = f", a checkpoint every {result['save_interval']}" if "save_interval" in result else ""
    return (
        f"{result['iterations']} iterations{saves}: "
        f"memory grows by {grown:.1%} at most, open files by {files}, "
        f"threads by {threads}"
    )


def delayed_update(result: dict) -> str:
    """What the delay costs in loss, means over seeds, and what it hides."""
    step, rows = result["step"], result["losses"]
    last = {name: sum(row["last"][name] for row in rows) / len(rows) for name in rows[0]["last"]}
    text = (
        f"loss after {len(rows[0]['loss']['at once'])} iterations {last['at once']:.2f} with every update at once, "
        f"{last['after 50']:.2f} delayed after 50, {last['from the first']:.2f} from the first on"
    )
    if step is None:
        return text
    errors = [step["predicted_us"][name] / us - 1 for name, us in step["iteration_us"].items()]
    return (
        f"{text}; {step['hidden_step']:.0%} of the host's step hidden, {step['hidden']:.0%} of step and publishing "
        f"(predicted {step['predicted_hidden']:.0%}); "
        f"iteration time {step['ratio']:.2f} of that with every update at once (predicted "
        f"{step['predicted_ratio']:.2f}; the two times {errors[0]:+.0%} and {errors[1]:+.0%} off)"
    )


def robustness(result: dict) -> str:
    kills, rows = result["kills"], [row for part in DISTURBED for row in result.get(part, ())]
    inputs = sum(row["inputs"] for row in result["fuzzing"].values())
    failures = sum(len(row["failures"]) for row in result["fuzzing"].values())
    return (
        f"{inputs:,} fuzzed inputs: {failures} tracebacks or hangs; {kills['faults']} faults in training: "
        f"{kills['hangs']} hangs, {kills['leftovers']} left something behind, the next start differs in "
        f"{kills['next start differs'] + kills['next start failed']}, the rank was named in {kills['rank named']} of "
        f"{kills['rank to be named']}; {sum(row['as expected'] for row in rows)} of {len(rows)} disturbances by "
        "network, disk, clock and other jobs as expected"
    )


def strict_device(result: dict) -> str:
    return (
        f"{result['cases'] - len(result['wrong'])} of {result['cases']} drawn cases without a report on a stand-in of "
        f"a CUDA device; {result['seen']} of {result['taken_away']} orderings that were taken away are seen, "
        f"{len(result['not_reached'])} are not reached"
    )


def planner_scale(result: dict) -> str:
    plan = next(row for row in result["large"] if row["zero_stage"] == 3)
    return (
        f"PP {plan['pp']}, VP {plan['vp']}, {plan['microbatches']} micro-batches, zero stage 3: planned in "
        f"{plan['plan']['seconds']:.1f} s, loaded in {plan['load_and_validate']['seconds']:.2f} s, "
        f"{plan['schedule_bytes'] / 1e6:.1f} MB; time grows with size to the power {result['growth_exponent']:.2f}; "
        "over the lower bound "
        + ", ".join(f"{row['over_bound']:.1%} ({name})" for name, row in result["in_little_memory"].items())
    )


def states_on_drive(result: dict) -> str:
    """The parts that were run."""
    texts = []
    if rate := result.get("rate"):
        low, high = rate["spread"]
        texts.append(
            f"a step's reads and writes to the rate of a plain reader and writer together: {rate['ratio']:.2f} "
            f"({low:.2f} to {high:.2f})"
        )
    if infinity := result.get("infinity"):
        low, high = infinity["spread"]
        ours, theirs = (infinity["held_bytes"][name] / 1e9 for name in ("ours", "infinity"))
        texts.append(
            f"iteration time to ZeRO-Infinity's {infinity['ratio']:.2f} ({low:.2f} to {high:.2f}), in {ours:.2f} GB of "
            f"memory (theirs {theirs:.2f})"
        )
    if equal := result.get("equal"):
        texts.append(f"training {'equals' if equal['holds'] else 'DIFFERS from'} that with states in memory")
    if larger := result.get("larger"):
        us = larger["iteration_us"]
        texts.append(
            f"{larger['parameters'] / 1e9:.2f}B parameters with {larger['states_bytes'] / 2**30:.1f} GiB of states on "
            f"a machine of {larger['memory_bytes'] / 2**30:.1f} GiB: {len(us)} iterations of {max(us) / 1e6:.0f} s at "
            f"most, {larger['most_resident_bytes'] / 2**30:.1f} GiB held, {larger['rates']['both'] / 1e6:.0f} MB/s"
        )
    return "; ".join(texts)


def patched(result: dict) -> str:
    low, high = result["ratio"]["patched"]["mean_95"]
    return (
        f"{result['ratio']['patched']['median']:.2f}; 95 % interval of the mean {low:.2f} to {high:.2f}, "
        f"so differences below that are not seen; losses {'equal' if result['losses_equal'] else 'DIFFER'}"
    )


def device_limits(result: dict) -> str:
    """Iteration time to stock's at every limit, how far bills are off, and losses beside stock's."""
    rows = [row for row in result["rows"] if "device_bytes" in row]
    off = max(abs(ratio - 1) for row in rows for ratio in row["bill_to_census"])
    ratio = lambda row: f"{sum(row['to_stock']) / len(row['to_stock']):.2f}"
    points = "; ".join(f"{row['layout']} at {row['limit']} {ratio(row)}" for row in rows)
    text = f"iteration time to stock's, mean of rounds: {points}; a bill is at most {off:.2%} off its census"
    if losses := result["losses"]:
        worst = losses["largest_loss_difference"]
        text += f"; over {losses['iterations']} iterations in float32 losses differ by at most {worst:.1e}"
        if "largest_control_difference" in losses:
            control = losses["largest_control_difference"]
            text += f", those of stock Megatron with another order of sums by {control:.1e}"
    return text


DISTURBED = ("network", "disk", "clock", "jobs")
HOOKS = "Megatron's pre-hooks"
CLUSTER = "sudo .venv/bin/python benchmarks/emulated_cluster.py"
ROWS = {
    "main_job": Row("Scheduled to stock on one node", "benchmarks/main_job.py runs/NAME", main_job),
    "parity": Row(
        "Does every schedule that validates train like Megatron, to the last bit?",
        "benchmarks/parity.py",
        lambda r: (
            f"{r['equal']} of {r['cases']} equal; {r['controls_seen']} of {r['controls']} broken controls are seen"
        ),
    ),
    "emulated_cluster": Row("Two nodes of two ranks, zero stage 1", CLUSTER, cluster),
    "emulated_cluster_slow": Row(
        "The same over a slower link", f"{CLUSTER} --gbit 0.09 --policies hierarchical all-cpu hybrid", cluster
    ),
    "emulated_cluster_2x2_pp1_zero3": Row("The same at zero stage 3", f"{CLUSTER} --gbit 1.05 --zero-stage 3", cluster),
    "emulated_cluster_4x1_pp2_zero1": Row(
        "Four nodes of one rank, PP 2", f"{CLUSTER} --gbit 2.5 --nodes 4 --per-node 1 --pp 2 --vp 2", cluster
    ),
    "simulated_clusters": Row(
        "On which known machines would a plan win?", "benchmarks/simulated_clusters.py", simulated_clusters
    ),
    "peers": Row("Device bytes beside what people use", "benchmarks/peers.py", peers),
    "peers_slow_link": Row("The same on two nodes over a slow link", "benchmarks/peers.py --gbit 2.5", peers),
    "device_limits": Row(
        "Training within a limit of device memory in all", "benchmarks/device_limits.py", device_limits
    ),
    "planner_suite": Row(
        "How far are plans of large models from the proven bound?",
        "benchmarks/planner_suite.py",
        lambda r: (
            f"median {r['summary']['median_gap']:.2%}, worst {r['summary']['worst_gap']:.2%} of "
            f"{r['summary']['rows']} rows"
        ),
    ),
    "verdict_measured": Row(
        "Is the verdict of `plan` right of measured pairs of runs?",
        "benchmarks/verdict_measured.py",
        lambda result: (
            verdicts(result["summary"])
            + f"; {result['summary']['wrong']} wrong, {result['summary']['undecided']} not decided by the measurement; "
            f"measured gain in the 90 % interval in {result['summary']['covered']:.0%}, "
            f"within two standard errors of it in {result['summary']['covered_within_two_standard_errors']:.0%}"
        ),
    ),
    "verdict_truth": Row(
        "Is the verdict right of cost tables with 10 to 40 % of noise, beside tables known to be true?",
        "benchmarks/verdict_truth.py --first 900 --cases 60",
        lambda result: (
            "**simulated** "
            + verdicts(result["summary"])
            + f"; precision {result['summary']['precision']:.0%}, recall {result['summary']['recall']:.0%} "
            f"(of gains of 5 % {result['summary']['recall_of_gains_of_5_percent']:.0%}, "
            f"of 10 % {result['summary']['recall_of_gains_of_10_percent']:.0%}), "
            f"true gain in the 90 % interval in {result['summary']['covered']:.0%}"
        ),
    ),
    "exact_gaps": Row(
        "How far is hybrid from the exact solver on random small cases?",
        "benchmarks/exact_gaps.py",
        lambda r: (
            f"mean {r['summary']['mean_gap']:.2%}, worst {r['summary']['worst_gap']:.1%} of {r['summary']['cases']} "
            f"cases; {r['summary']['faster_than_exact']} faster than the solver's, which tries fewer groupings"
        ),
    ),
    "fit_truth": Row(
        "Is what `fit` chooses the fastest of all settings, each planned in full?",
        "benchmarks/fit_truth.py",
        lambda r: (
            f"**simulated** within 1 % in {r['agree']} of {r['cases']} small cases, worst {r['worst_ratio'] - 1:.2%} "
            f"of {r['compared']} in which something fits"
        ),
    ),
    "planner_scale": Row("How does planning grow?", "benchmarks/planner_scale.py", planner_scale),
    "host_step": Row(
        "Is the host's step as fast as memory, and how long do pages take?", "benchmarks/host_step.py", host_step
    ),
    "hot_path": Row("What does our Python cost the training thread?", "benchmarks/hot_path.py", hot_path),
    "states_on_drive": Row(
        "What do optimizer states on a drive cost, and what can be trained by them?",
        "benchmarks/states_on_drive.py",
        states_on_drive,
    ),
    "patched_iteration_time": Row(
        "Patched without the option, to unpatched", "benchmarks/patched_iteration_time.py MIRROR", patched
    ),
    "robustness": Row(
        "Does it survive what users and machines do to it?",
        "sudo .venv/bin/python benchmarks/robustness.py",
        robustness,
    ),
    "strict_device": Row(
        "Would a missing event or wait on CUDA be seen?",
        "benchmarks/strict_device.py --cases 300 --tries 8",
        strict_device,
    ),
    "delayed_update": Row(
        "What does the delayed parameter update hide, and what does it cost in loss?",
        "benchmarks/delayed_update.py",
        delayed_update,
    ),
    "endurance": Row("Does anything grow?", "benchmarks/endurance.py", endurance),
}


def date_of(result: dict) -> str:
    """The day on which a result was made, wherever its JSON says so."""
    places = (result, result.get("about"), result.get("machine"))
    return next(place["date"][:10] for place in places if isinstance(place, dict) and "date" in place)


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
        lines.append(f"| {row.question} | {row.figure(result)} | {date_of(result)} | `{row.command}` | `{name}.json` |")
    return "\n".join(lines)


def page(text: str) -> str:
    """``text`` of the page with the table written anew."""
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n{table()}\n{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
