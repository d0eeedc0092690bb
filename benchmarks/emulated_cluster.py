"""A cluster emulated on one machine: stock beside scheduled training over shaped links.

    sudo .venv/bin/python benchmarks/emulated_cluster.py [--gbit 0.25 0.5 1 2.5 5 10] [--nodes 2 --per-node 2]

Nodes are network namespaces joined by a bridge (benchmarks/emulated_nodes.py). At every rate:
measure a cost table inside the emulation, plan by every policy, then train stock Megatron and
every schedule in turns of seconds (benchmarks/in_turns.py), and count the bytes that leave each
node. Compute is measured once more in turns with the runs, because a machine changes its pace: "in turns" compares every turn with
what is predicted at the pace of compute in the turns just before and behind it (benchmarks/pace.py). With --zero-stage 3 the policies are
compared with ``all-gpu``, because stock Megatron has no zero stage 3.
Needs root and iproute2. Writes benchmarks/results/emulated_cluster.json, or with other nodes,
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
from emulated_nodes import Nodes, check_possible
from emulation import ROOT, Emulation, behind_every_second, describe, file_name, model_options
from in_turns import Ended, at_turn, ratio_of, ratios_to
from look_ahead import without_look_ahead
from machine import about_this_machine
from measuring import CORPUS
from pace import at_pace, relative_pace
from planned_traffic import planned_network_bytes
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from megatron_ext import files, planner, simulator
from megatron_ext.errors import InputError
from megatron_ext.report.spread import summarize
from megatron_ext.schedule import model as schedule_file
from megatron_ext.simulator.bound import lower_bound
from megatron_ext.simulator.simulate import with_prediction
from megatron_ext.simulator.stock import stock_schedule
from megatron_ext.simulator.timing import Timing

SHORT = 4
"""Iterations of the run that is subtracted when bytes are counted: what a run sends besides them."""

ITERATIONS_OF_A_TURN = 4
"""One of them is stopped in its middle."""

MEASURE_LONGER = 1.1

LATE = "-late"
"""Behind a policy's name: its plan without look-ahead."""


def plan(work, table, policy: str):
    """The schedule of a policy; with ``-late`` behind its name, without look-ahead."""
    schedule = planner.plan(work, table, policy=policy.removesuffix(LATE), extrapolate=True)
    if policy.endswith(LATE):
        schedule = without_look_ahead(schedule, work)
        schedule = with_prediction(schedule, simulator.simulate(work, table, schedule, extrapolate=True))
    return schedule


def one_rate(gbit_s: float, args, bar) -> dict:
    """All runs at one network rate."""
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as temporary, Nodes(args.nodes, gbit_s) as nodes:
        folder = args.keep or Path(temporary)
        work = describe(args, folder)
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
        slowest_us = max(simulator.simulate(work, table, schedules.get(kind), extrapolate=True).step_time_us for kind in kinds)
        turn_s = max(args.turn, ITERATIONS_OF_A_TURN * slowest_us / 1e6)
        # Of its own turns, until the others have trained, or a little longer: the last turn too has one behind it.
        seconds = MEASURE_LONGER * behind_every_second(list(kinds), "measuring").count("measuring") * args.iters * slowest_us / 1e6
        trained, compute, times = emulation.train(kinds, args.iters, turn_s, work, lambda name: bar.update(task, description=f"{gbit_s:g} Gbit/s: training in turns: {name}"), seconds)
        pace = relative_pace(table, compute, times)
        bar.update(task, description=f"{gbit_s:g} Gbit/s: done", total=1, completed=1)
        sent = {kind: (one.sent_bytes - short[kind]) / (args.iters - SHORT) for kind, one in trained.items()}
        rows = [row_of(kind, trained, sent[kind], work, table, pace, schedules.get(kind)) | {"differences": differences.get(kind, ())} for kind in kinds]
        against_plan(rows)
        tables = {name: files.load(folder / f"{name}.json", dict) for name in ("cost_table", "cost_table_in_turns")}
        return {"gbit_s": gbit_s, "gathers_to_compute": gathers_to_compute(work, table), "turn_s": turn_s, "pace_of_turns": pace, "load_before": load, "load_after": os.getloadavg()[0], "rows": rows, "skipped": skipped, **tables}


def gathers_to_compute(work, table) -> float:
    """All-gathers to compute of a rank, both alone by the table but for the processors that ranks share: 1 where
    gathering by all-gather takes as long as computing."""
    timing, parallel = Timing(work, table, extrapolate=True), work.parallel
    gathers_us = simulator.simulate(work, table, planner.plan(work, table, policy="all-gpu", extrapolate=True), extrapolate=True).gather_us
    compute_us = max(sum(sum(times.forward) + sum(times.backward) for times in layers) for layers in timing.layers) * parallel.num_microbatches
    machines = [timing.machine_of(rank, replica) for rank in range(parallel.pp) for replica in range(parallel.dp)]
    ranks = max(map(machines.count, machines))
    return gathers_us / (compute_us * max(ranks / (timing.processors or ranks), 1.0))


def baseline(kinds) -> str:
    """What the others are compared with."""
    return next((kind for kind in ("stock", "all-gpu") if kind in kinds), next(iter(kinds)))


def row_of(kind: str, trained: dict, sent_bytes: float, work, table, pace: dict[int, float], schedule) -> dict:
    """The figures of one policy beside the baseline's; predicted by the table that was planned from, and, of every
    turn, by the same at the pace of compute in the turns just before and behind it."""
    base = baseline(trained)
    mine, us = trained[kind], summarize(trained[kind].iteration_us.values)
    predicted = simulator.simulate(work, table, schedule, extrapolate=True).step_time_us
    turns = at_their_pace(mine.iteration_us.of_turn, pace, work, table, schedule)
    row = {
        "policy": kind, "baseline": base, **{name: summarize(getattr(mine, name).values).as_json() for name in ("iteration_us", "exposed_us", "gather_us")},
        "ratio": 1.0, "predicted_us": predicted, "prediction_error": predicted / us.median_us - 1,
        "predicted_in_turns_us": median(turn.predicted_us for turn in turns), "prediction_error_in_turns": median(turn.predicted_us / turn.us for turn in turns) - 1,
        "turns": [turn._asdict() for turn in turns],
        "sent_bytes_per_iteration": sent_bytes, "loss": mine.loss, "same_parameters": mine.parameter_sha256 == trained[base].parameter_sha256,
    }  # fmt: skip
    if kind != base:
        ratio = ratio_of(ratios_to(trained[base].iteration_us.of_turn, mine.iteration_us.of_turn))
        row |= {"ratio": ratio.median, "ratio_of_turns": ratio._asdict()}
    row["planned_parameter_bytes"] = planned_network_bytes(schedule or stock_schedule(work))
    if schedule:
        bound = lower_bound(work, Timing(work, table, extrapolate=True))
        row |= {"lower_bound_us": bound, "over_bound": us.median_us / bound - 1, "over_bound_in_turns": median(turn.us / turn.lower_bound_us for turn in turns) - 1}
    return row


class AtPace(NamedTuple):
    """A turn of a policy: an iteration's median, and what is predicted and proven at the pace of its time."""

    turn: int
    pace: float
    us: float
    predicted_us: float
    lower_bound_us: float | None


def at_their_pace(of_turn: dict[int, float], pace: dict[int, float], work, table, schedule) -> list[AtPace]:
    """Every turn with a turn of compute before and behind it.

    Raises:
        Ended: there is none.
    """
    found = []
    for turn, us in sorted(of_turn.items()):
        factor = at_turn(pace, turn)
        if factor is None:
            continue
        then = at_pace(table, factor)
        bound = lower_bound(work, Timing(work, then, extrapolate=True)) if schedule else None
        found.append(AtPace(turn, factor, us, simulator.simulate(work, then, schedule, extrapolate=True).step_time_us, bound))
    if not found:
        raise Ended("no turn has turns of compute before and behind it: more iterations or longer turns are needed")
    return found


def against_plan(rows: list[dict]) -> None:
    """Gradients and barriers cross the network too, the same for every policy: so it is the bytes
    saved beside the baseline that are compared with the plan's."""
    base = next(row for row in rows if row["policy"] == row["baseline"])
    for row in rows:
        saved = base["sent_bytes_per_iteration"] - row["sent_bytes_per_iteration"]
        planned = base["planned_parameter_bytes"] - row["planned_parameter_bytes"]
        row |= {"saved_bytes": saved, "planned_saved_bytes": planned, "saved_error": saved / planned - 1 if planned else None}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--gbit", type=float, nargs="+", default=[0.25, 0.5, 1, 2.5, 5, 10], help="Network rates, Gbit/s.")
    add("--nodes", type=int, default=2)
    add("--per-node", type=int, default=2, help="Ranks of a node.")
    add("--pp", type=int, default=1)
    add("--vp", type=int, default=1)
    add("--zero-stage", type=int, choices=(1, 3), default=1)
    add("--limit-device-bytes", dest="device_bytes", type=int, default=None, help="With zero stage 3: whole parameters on one device at a time.")
    add("--policies", nargs="+", default=["all-gpu", "hierarchical", "all-cpu", "hybrid"], help="hybrid-late: the hybrid plan without its look-ahead")
    add("--layers", type=int, default=8)
    add("--hidden", type=int, default=256)
    add("--seq", type=int, default=128)
    add("--micro-batch-size", type=int, default=2)
    add("--micro-batches", type=int, default=4)
    add("--iters", type=int, default=40)
    add("--warm-up", type=int, default=12, help="Iterations that are not timed: the first few of a run take longer, in some runs a dozen of them.")
    add("--turn", type=float, default=6, help=f"Least seconds of a turn; it holds at least {ITERATIONS_OF_A_TURN} iterations of the slowest, as predicted.")
    add("--measure-seconds", type=float, default=None, help="Of a cost table; by default more where the network is slow.")
    add("--keep", type=Path, default=None, help="Keep logs, plans and traces of the rate that ran last in this new folder.")
    add("--out", type=Path, default=None)
    args = parser.parse_args()
    if args.keep:
        args.keep = args.keep.resolve()
        args.keep.mkdir(exist_ok=True, parents=True)
    os.chdir(ROOT)
    try:
        check_possible()
        least = args.warm_up + 4 * ITERATIONS_OF_A_TURN
        if args.iters < least:
            raise InputError(f"expected at least {least} iterations: fewer make no two turns that can be compared", field="--iters", value=args.iters)
        if not Path(f"{CORPUS}.idx").exists():
            raise InputError("is not there yet: scripts/pretrain_gpt_hybrid.sh builds it", file=CORPUS)
        model_options(args)
        name = "emulated_cluster" + ("" if (args.nodes, args.per_node, args.pp, args.zero_stage) == (2, 2, 1, 1) else f"_{args.nodes}x{args.per_node}_pp{args.pp}_zero{args.zero_stage}")
        out = args.out or ROOT / "benchmarks" / "results" / f"{name}.json"
        options = {key: value for key, value in vars(args).items() if key not in ("out", "keep")}
        before, rates = os.getloadavg()[0], []
        with Progress(console=Console(stderr=True)) as bar:
            for gbit_s in args.gbit:
                rates.append(one_rate(gbit_s, args, bar))
                # After every rate: an hour of measuring must not be lost with the last.
                files.save(out, {"about": about_this_machine(load_before=before), "emulated": True, "options": options, "rates": rates}, indent=1)
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
    table = Table("Gbit/s", "policy", "iteration ms (p10 - p90)", "ratio (+-)", "exposed ms", "predicted ms", "in turns", "over the bound, in turns", "sent MB an iteration", "saved MB, planned", "training", title="emulated cluster")
    for rate in rates:
        for row in rate["rows"]:
            us, ratio = row["iteration_us"], row.get("ratio_of_turns")
            table.add_row(
                f"{rate['gbit_s']:g}", row["policy"], f"{us['median_us'] / 1e3:.1f} ({us['p10_us'] / 1e3:.1f} - {us['p90_us'] / 1e3:.1f})",
                f"{row['ratio']:.3f}" + (f" ({2 * ratio['standard_error']:.3f})" if ratio else ""),
                f"{row['exposed_us']['median_us'] / 1e3:.1f}", f"{row['predicted_us'] / 1e3:.1f} ({row['prediction_error']:+.0%})", f"{row['prediction_error_in_turns']:+.0%}",
                f"{row['over_bound']:+.0%}, {row['over_bound_in_turns']:+.0%}" if "over_bound" in row else "",
                f"{row['sent_bytes_per_iteration'] / 1e6:.2f}", f"{row['saved_bytes'] / 1e6:.3f}, {row['planned_saved_bytes'] / 1e6:.3f}", "DIFFERS: " + row["differences"][0] if row["differences"] else "bitwise",
            )  # fmt: skip
        for policy, reason in rate["skipped"].items():
            table.add_row(f"{rate['gbit_s']:g}", policy, f"not applicable: {reason}")
    console = Console(width=190)
    console.print(table)
    console.print("ratio: to the baseline's turns just before and behind, +- two standard errors of the median; in turns: every turn by compute in the turns just before and behind it")
    console.print(f"bitwise: over the first {SHORT} iterations losses, gradient norms and parameters are those of the baseline, or of Megatron's own gathers at the schedule's bucket layout")
    rows = [row for rate in rates for row in rate["rows"]]
    for name, by in (("prediction_error", "the table planned from"), ("prediction_error_in_turns", "compute in the turns beside each")):
        console.print(f"predicted iteration time by {by}: at most {max(abs(row[name]) for row in rows):.1%} off")
    for rate in rates:
        console.print(f"{rate['gbit_s']:g} Gbit/s: by the table all-gathers take {rate['gathers_to_compute']:.2f} of what computing takes")
        ratios = {row["policy"]: row["ratio"] for row in rate["rows"]}
        if "hybrid" in ratios:
            # What was planned without look-ahead is a control, which no planner offers.
            best = min((policy for policy in ratios if not policy.endswith(LATE)), key=ratios.get)
            console.print(f"{rate['gbit_s']:g} Gbit/s: hybrid takes {ratios['hybrid'] / ratios[best] - 1:.1%} longer than the best policy, {best}")
        for policy in ratios:
            if policy.endswith(LATE):
                console.print(f"{rate['gbit_s']:g} Gbit/s: {policy.removesuffix(LATE)} takes {ratios[policy.removesuffix(LATE)] / ratios[policy]:.3f} of what the same takes without look-ahead")


if __name__ == "__main__":
    sys.exit(main())
