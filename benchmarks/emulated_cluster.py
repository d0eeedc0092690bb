"""A cluster emulated on one machine: stock beside scheduled training over shaped links.

    sudo .venv/bin/python benchmarks/emulated_cluster.py [--gbit 0.25 0.5 1 2.5 5 10] [--nodes 2 --per-node 2]

Nodes are network namespaces joined by a bridge (benchmarks/emulated_nodes.py). At every rate:
measure a cost table inside the emulation, plan by every policy, then train stock Megatron and
every schedule in interleaved time slices of seconds (benchmarks/interleaved_ab.py), and count the bytes that leave each
node. Compute is measured once more, interleaved with the runs, because a machine changes its speed. Figures called
"interleaved" compare every slice with the prediction at the speed that compute had in the slices just before and after
it (benchmarks/clock_drift.py). With --zero-stage 3 the policies are compared with ``all-gpu``, because stock Megatron
has no zero stage 3. Needs root and iproute2. Writes benchmarks/results/emulated_cluster.json, or with other nodes,
pipeline or zero stage a file that says so.
"""

import argparse
import os
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import NamedTuple

import pictures
from clock_drift import at_speed, relative_speed
from emulated_nodes import Nodes, check_possible
from emulation import ROOT, Emulation, behind_every_second, file_name, model_options, workload_of
from interleaved_ab import Ended, at_slice, ratio_of, ratios_to
from look_ahead import without_look_ahead
from machine import about_this_machine
from measuring import CORPUS, add_model_options
from planned_traffic import planned_network_bytes
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from megatron_ext import planner
from megatron_ext.bounds.lower_bound import lower_bound
from megatron_ext.formats import json_files
from megatron_ext.formats.errors import InputError
from megatron_ext.planner.evaluate import evaluate
from megatron_ext.planner.stock import stock_schedule
from megatron_ext.report.spread import summarize
from megatron_ext.schedule import user_defined_schedule as schedule_file
from megatron_ext.simulator.simulation import with_prediction
from megatron_ext.simulator.timing import Timing

SHORT = 4
"""Iterations of the run that is subtracted when bytes are counted: what a run sends besides them."""

ITERATIONS_OF_A_SLICE = 4
"""One of them is stopped in its middle."""

MEASURE_LONGER = 1.1

LATE = "-late"
"""Behind a policy's name: its plan without look-ahead."""


def plan(work, table, policy: str):
    """The schedule of a policy; with ``-late`` behind its name, without look-ahead."""
    schedule = planner.plan(work, table, policy=policy.removesuffix(LATE), extrapolate=True)
    if policy.endswith(LATE):
        schedule = without_look_ahead(schedule, work)
        schedule = with_prediction(schedule, evaluate(work, table, schedule, extrapolate=True))
    return schedule


def one_rate(gbit_s: float, args, bar) -> dict:
    """All runs at one network rate."""
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as temporary, Nodes(args.nodes, gbit_s) as nodes:
        folder = args.keep or Path(temporary)
        work = workload_of(args, folder)
        emulation = Emulation(nodes, args, folder)
        task = bar.add_task(f"{gbit_s:g} Gbit/s: measuring", total=None)
        table = emulation.measure(work, "cost_table")
        kinds: dict[str, Path | None] = {"stock": None} if work.zero_stage == 1 else {}
        schedules, skipped = {}, {}
        for policy in args.policies:
            try:
                schedules[policy] = plan(work, table, policy)
            except InputError as error:
                skipped[policy] = str(error)
                continue
            kinds[policy] = folder / f"{file_name(policy)}.schedule.json"
            schedule_file.save(kinds[policy], schedules[policy])
        short = {}
        for kind, path in kinds.items():
            bar.update(task, description=f"{gbit_s:g} Gbit/s: {kind}, a short run")
            short[kind] = emulation.train_short(kind, SHORT, path)
        base = baseline(kinds)
        differences = {kind: emulation.differences(kind, base, SHORT, path) for kind, path in kinds.items() if path}
        slowest_us = max(
            evaluate(work, table, schedules.get(kind), extrapolate=True).iteration_time_us for kind in kinds
        )
        slice_s = max(args.slice, ITERATIONS_OF_A_SLICE * slowest_us / 1e6)
        # Of its own slices, until the others have trained, or a little longer: the last slice too has one behind it.
        seconds = (
            MEASURE_LONGER
            * behind_every_second(list(kinds), "measuring").count("measuring")
            * args.iters
            * slowest_us
            / 1e6
        )
        trained, compute, times = emulation.train(
            kinds,
            args.iters,
            slice_s,
            work,
            lambda name: bar.update(task, description=f"{gbit_s:g} Gbit/s: training interleaved: {name}"),
            seconds,
        )
        speed = relative_speed(table, compute, times)
        bar.update(task, description=f"{gbit_s:g} Gbit/s: done", total=1, completed=1)
        sent = {kind: (one.sent_bytes - short[kind]) / (args.iters - SHORT) for kind, one in trained.items()}
        rows = [
            row_of(kind, trained, sent[kind], work, table, speed, schedules.get(kind))
            | {"differences": differences.get(kind, ())}
            for kind in kinds
        ]
        against_plan(rows)
        tables = {
            name: json_files.load(folder / f"{name}.json", dict) for name in ("cost_table", "cost_table_interleaved")
        }
        return {
            "gbit_s": gbit_s,
            "gathers_to_compute": gathers_to_compute(work, table),
            "slice_s": slice_s,
            "speed_of_slices": speed,
            "load_before": load,
            "load_after": os.getloadavg()[0],
            "rows": rows,
            "skipped": skipped,
            **tables,
        }


def gathers_to_compute(work, table) -> float:
    """All-gathers to compute of a rank, both alone by the table but for the processors that ranks share: 1 where
    gathering by all-gather takes as long as computing."""
    timing, parallel = Timing(work, table, extrapolate=True), work.parallel
    gathers_us = evaluate(
        work, table, planner.plan(work, table, policy="all-gpu", extrapolate=True), extrapolate=True
    ).gather_us
    compute_us = (
        max(sum(sum(times.forward) + sum(times.backward) for times in layers) for layers in timing.layers)
        * parallel.num_microbatches
    )
    times = timing.host_cpu
    if times is None:
        return gathers_us / compute_us
    machines = [times.machine_of(rank, replica) for rank in range(parallel.pp) for replica in range(parallel.dp)]
    ranks = max(map(machines.count, machines))
    return gathers_us / (compute_us * max(ranks / times.count, 1.0))


def baseline(kinds) -> str:
    """What the others are compared with."""
    return next((kind for kind in ("stock", "all-gpu") if kind in kinds), next(iter(kinds)))


def row_of(kind: str, trained: dict, sent_bytes: float, work, table, speed: dict[int, float], schedule) -> dict:
    """The figures of one policy beside the baseline's; predicted by the table that was planned from, and, of every
    slice, by the same at the speed of compute in the slices just before and behind it."""
    base = baseline(trained)
    mine, us = trained[kind], summarize(trained[kind].iteration_us.values)
    predicted = evaluate(work, table, schedule, extrapolate=True).iteration_time_us
    slices = at_their_speed(mine.iteration_us.of_slice, speed, work, table, schedule)
    row = {
        "policy": kind,
        "baseline": base,
        **{
            name: summarize(getattr(mine, name).values).as_json()
            for name in ("iteration_us", "exposed_us", "gather_us")
        },
        "ratio": 1.0,
        "predicted_us": predicted,
        "prediction_error": predicted / us.median_us - 1,
        "predicted_interleaved_us": median(time_slice.predicted_us for time_slice in slices),
        "prediction_error_interleaved": median(time_slice.predicted_us / time_slice.us for time_slice in slices) - 1,
        "slices": [time_slice._asdict() for time_slice in slices],
        "sent_bytes_per_iteration": sent_bytes,
        "loss": mine.loss,
        "same_parameters": mine.parameter_sha256 == trained[base].parameter_sha256,
    }
    if kind != base:
        ratio = ratio_of(ratios_to(trained[base].iteration_us.of_slice, mine.iteration_us.of_slice))
        row |= {"ratio": ratio.median, "ratio_of_slices": ratio._asdict()}
    row["planned_parameter_bytes"] = planned_network_bytes(schedule or stock_schedule(work))
    if schedule:
        bound = lower_bound(work, Timing(work, table, extrapolate=True))
        row |= {
            "lower_bound_us": bound,
            "over_bound": us.median_us / bound - 1,
            "over_bound_interleaved": median(time_slice.us / time_slice.lower_bound_us for time_slice in slices) - 1,
        }
    return row


class AtSpeed(NamedTuple):
    """A slice of a policy: an iteration's median, and what is predicted and proven at the speed of its time."""

    slice: int
    speed: float
    us: float
    predicted_us: float
    lower_bound_us: float | None


def at_their_speed(of_slice: dict[int, float], speed: dict[int, float], work, table, schedule) -> list[AtSpeed]:
    """Every slice with a slice of compute before and behind it.

    Raises:
        Ended: there is none.
    """
    found = []
    for time_slice, us in sorted(of_slice.items()):
        factor = at_slice(speed, time_slice)
        if factor is None:
            continue
        then = at_speed(table, factor)
        bound = lower_bound(work, Timing(work, then, extrapolate=True)) if schedule else None
        found.append(
            AtSpeed(time_slice, factor, us, evaluate(work, then, schedule, extrapolate=True).iteration_time_us, bound)
        )
    if not found:
        raise Ended("no slice has slices of compute before and behind it: more iterations or longer slices are needed")
    return found


def against_plan(rows: list[dict]) -> None:
    """Gradients and barriers cross the network too, the same for every policy: so it is the bytes
    saved beside the baseline that are compared with the plan's."""
    base = next(row for row in rows if row["policy"] == row["baseline"])
    for row in rows:
        saved = base["sent_bytes_per_iteration"] - row["sent_bytes_per_iteration"]
        planned = base["planned_parameter_bytes"] - row["planned_parameter_bytes"]
        row |= {
            "saved_bytes": saved,
            "planned_saved_bytes": planned,
            "saved_error": saved / planned - 1 if planned else None,
        }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--gbit", type=float, nargs="+", default=[0.25, 0.5, 1, 2.5, 5, 10], help="Network rates, Gbit/s.")
    add("--nodes", type=int, default=2)
    add("--per-node", type=int, default=2, help="Ranks of a node.")
    add("--pp", type=int, default=1)
    add("--vp", type=int, default=1)
    add("--zero-stage", type=int, choices=(1, 3), default=1)
    add(
        "--limit-whole-parameter-bytes",
        dest="whole_parameter_bytes",
        type=int,
        default=None,
        help="With zero stage 3: whole parameters on one device at a time.",
    )
    add(
        "--policies",
        nargs="+",
        default=["all-gpu", "hierarchical", "all-cpu", "hybrid"],
        help="hybrid-late: the hybrid plan without its look-ahead",
    )
    add_model_options(parser)
    add("--micro-batches", type=int, default=4)
    add("--iters", type=int, default=40)
    add(
        "--warm-up",
        type=int,
        default=12,
        help="Iterations that are not timed: the first few of a run take longer, in some runs a dozen of them.",
    )
    add(
        "--slice",
        type=float,
        default=6,
        help=(
            f"Least seconds of a slice; it holds at least {ITERATIONS_OF_A_SLICE} iterations of the "
            "slowest, as predicted."
        ),
    )
    add(
        "--measure-seconds",
        type=float,
        default=None,
        help="Of a cost table; by default more where the network is slow.",
    )
    add(
        "--keep",
        type=Path,
        default=None,
        help="Keep logs, plans and traces of the rate that ran last in this new folder.",
    )
    add("--out", type=Path, default=None)
    args = parser.parse_args()
    if args.keep:
        args.keep = args.keep.resolve()
        args.keep.mkdir(exist_ok=True, parents=True)
    os.chdir(ROOT)
    try:
        check_possible()
        least = args.warm_up + 4 * ITERATIONS_OF_A_SLICE
        if args.iters < least:
            raise InputError(
                f"expected at least {least} iterations: fewer make no two slices that can be compared",
                field="--iters",
                value=args.iters,
            )
        if not Path(f"{CORPUS}.idx").exists():
            raise InputError("is not there yet: scripts/pretrain_gpt_hybrid.sh builds it", file=CORPUS)
        model_options(args)
        name = "emulated_cluster" + (
            ""
            if (args.nodes, args.per_node, args.pp, args.zero_stage) == (2, 2, 1, 1)
            else f"_{args.nodes}x{args.per_node}_pp{args.pp}_zero{args.zero_stage}"
        )
        out = args.out or ROOT / "benchmarks" / "results" / f"{name}.json"
        options = {key: value for key, value in vars(args).items() if key not in ("out", "keep")}
        before, rates = os.getloadavg()[0], []
        with Progress(console=Console(stderr=True)) as bar:
            for gbit_s in args.gbit:
                rates.append(one_rate(gbit_s, args, bar))
                # After every rate: an hour of measuring must not be lost with the last.
                json_files.save(
                    out,
                    {
                        "about": about_this_machine(load_before=before),
                        "emulated": True,
                        "options": options,
                        "rates": rates,
                    },
                    indent=1,
                )
    except InputError as error:
        print(f"emulated_cluster: {error}", file=sys.stderr)
        return 2
    except RuntimeError as error:
        print(f"emulated_cluster: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    pictures.draw(out)
    show(rates)
    return int(any(row["differences"] for rate in rates for row in rate["rows"]))


def show(rates: list[dict]) -> None:
    columns = "Gbit/s; policy; iteration ms (p10 - p90); ratio (+-); exposed ms; predicted ms; interleaved".split("; ")
    columns += "over the bound, interleaved; sent MB an iteration; saved MB, planned; training".split("; ")
    table = Table(*columns, title="emulated cluster")
    for rate in rates:
        for row in rate["rows"]:
            us, ratio = row["iteration_us"], row.get("ratio_of_slices")
            table.add_row(
                f"{rate['gbit_s']:g}",
                row["policy"],
                f"{us['median_us'] / 1e3:.1f} ({us['p10_us'] / 1e3:.1f} - {us['p90_us'] / 1e3:.1f})",
                f"{row['ratio']:.3f}" + (f" ({2 * ratio['standard_error']:.3f})" if ratio else ""),
                f"{row['exposed_us']['median_us'] / 1e3:.1f}",
                f"{row['predicted_us'] / 1e3:.1f} ({row['prediction_error']:+.0%})",
                f"{row['prediction_error_interleaved']:+.0%}",
                f"{row['over_bound']:+.0%}, {row['over_bound_interleaved']:+.0%}" if "over_bound" in row else "",
                f"{row['sent_bytes_per_iteration'] / 1e6:.2f}",
                f"{row['saved_bytes'] / 1e6:.3f}, {row['planned_saved_bytes'] / 1e6:.3f}",
                "DIFFERS: " + row["differences"][0] if row["differences"] else "bitwise",
            )
        for policy, reason in rate["skipped"].items():
            table.add_row(f"{rate['gbit_s']:g}", policy, f"not applicable: {reason}")
    console = Console(width=190)
    console.print(table)
    console.print(
        "ratio: to the baseline's slices just before and after, +- two standard errors of the median; "
        "interleaved: every slice by compute in the slices just before and after it"
    )
    console.print(
        f"bitwise: over the first {SHORT} iterations losses, gradient norms and parameters are those of the baseline, "
        "or of Megatron's own gathers at the schedule's bucket layout"
    )
    rows = [row for rate in rates for row in rate["rows"]]
    for name, by in (
        ("prediction_error", "the table planned from"),
        ("prediction_error_interleaved", "compute in the slices beside each"),
    ):
        console.print(f"predicted iteration time by {by}: at most {max(abs(row[name]) for row in rows):.1%} off")
    for rate in rates:
        console.print(
            f"{rate['gbit_s']:g} Gbit/s: by the table all-gathers take {rate['gathers_to_compute']:.2f} of what "
            "computing takes"
        )
        ratios = {row["policy"]: row["ratio"] for row in rate["rows"]}
        if "hybrid" in ratios:
            # What was planned without look-ahead is a control, which no planner offers.
            best = min((policy for policy in ratios if not policy.endswith(LATE)), key=ratios.get)
            console.print(
                f"{rate['gbit_s']:g} Gbit/s: hybrid takes {ratios['hybrid'] / ratios[best] - 1:.1%} longer than the "
                f"best policy, {best}"
            )
        for policy in ratios:
            if policy.endswith(LATE):
                console.print(
                    f"{rate['gbit_s']:g} Gbit/s: {policy.removesuffix(LATE)} takes "
                    f"{ratios[policy.removesuffix(LATE)] / ratios[policy]:.3f} of what the same takes without "
                    "look-ahead"
                )


if __name__ == "__main__":
    sys.exit(main())
