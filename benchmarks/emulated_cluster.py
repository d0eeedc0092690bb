"""A cluster emulated on one machine: stock beside scheduled training over shaped links.

    sudo .venv/bin/python benchmarks/emulated_cluster.py [--gbit 0.25 0.5 1 2.5 5 10] [--nodes 2 --per-node 2]

Nodes are network namespaces joined by a bridge (benchmarks/emulated_nodes.py). At every rate:
measure a cost table inside the emulation, plan by every policy, then train stock Megatron and
every schedule in turns, and count the bytes that leave each node. With --zero-stage 3 the
policies are compared with ``all-gpu``, because stock Megatron has no zero stage 3.
Needs root and iproute2. Writes benchmarks/results/emulated_cluster.json, or with other nodes,
pipeline or zero stage a file that says so.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pictures
from emulated_nodes import Nodes, check_possible
from look_ahead import without_look_ahead
from machine import about_this_machine
from measuring import CORPUS, measure_command
from planned_traffic import planned_network_bytes
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from megatron_ext import files, planner, simulator
from megatron_ext.cost import model as cost
from megatron_ext.errors import InputError
from megatron_ext.report.measured import MeasuredTrace
from megatron_ext.report.spread import summarize, warm_up
from megatron_ext.runtime.launch import launch
from megatron_ext.schedule import model as schedule_file
from megatron_ext.simulator.simulate import with_prediction
from megatron_ext.simulator.stock import stock_schedule
from megatron_ext.workload import model as workload_file

ROOT = Path(__file__).resolve().parents[1]
SHORT = 4
"""Iterations of the run that is subtracted when bytes are counted: what a run sends besides them."""

LATE = "-late"
"""Behind a policy's name: its plan without look-ahead."""


class Emulation:
    """One rate: the nodes, the options of the model, and a folder for what comes and goes."""

    def __init__(self, nodes: Nodes, args, folder: Path):
        self.nodes, self.args, self.folder = nodes, args, folder
        self.model = model_options(args)
        self.world = args.nodes * args.per_node

    def run(self, name: str, command: list[str], **environment: str) -> int:
        """Run ``command`` as one rank each; returns the bytes sent meanwhile, over all nodes.

        Raises:
            RuntimeError: the run failed; the end of its output is in the message.
        """
        before = sum(self.nodes.sent_bytes())
        log = self.folder / f"{name}.log"
        with open(log, "w") as out:
            code = launch(
                [sys.executable, "benchmarks/enter_node.py", sys.executable, *command], self.world, stdout=out,
                environment={"PYTHONPATH": str(ROOT / ".megatron"), "PYTHONWARNINGS": "ignore", "TORCH_CPP_LOG_LEVEL": "ERROR"} | self.nodes.environment(self.args.per_node) | environment,
            )  # fmt: skip
        if code:
            raise RuntimeError(f"{name} ended with exit code {code}: {log.read_text()[-1500:]}")
        return sum(self.nodes.sent_bytes()) - before

    def measure(self, work) -> cost.CostTable:
        """A cost table, measured by all ranks over the shaped links."""
        args, out = self.args, self.folder / "cost_table.json"
        self.run("measure", ["-m", *measure_command(
            out, work, self.model, hidden=args.hidden, seq=args.seq, micro_batch_size=args.micro_batch_size, seconds=args.measure_seconds,
        )])  # fmt: skip
        return cost.load(out)

    def train(self, name: str, iterations: int, schedule: Path | None, trace: Path | None = None) -> dict:
        """One training run: its metrics, with the bytes that were sent."""
        metrics = self.folder / f"{name}.metrics.json"
        more = ["--user-defined-schedule", str(schedule)] if schedule else []
        more += ["--user-defined-schedule-trace", str(trace)] if trace else []
        sent = self.run(name, [
            "examples/pretrain_gpt_hybrid.py", *self.model, "--data-path", CORPUS, "--train-iters", str(iterations), "--metrics-path", str(metrics), *more,
        ])  # fmt: skip
        return files.load(metrics, dict) | {"sent_bytes": sent}


def model_options(args) -> list[str]:
    """The example's options for the asked layout; every data-parallel group crosses nodes."""
    world = args.nodes * args.per_node
    dp = world // args.pp
    if world % args.pp or dp <= args.per_node:
        raise InputError(f"with {args.nodes} nodes of {args.per_node} ranks, no data-parallel group would cross nodes", field="--pp", value=args.pp)
    options = [
        "--num-layers", str(args.layers), "--hidden-size", str(args.hidden), "--num-attention-heads", "4", "--seq-length", str(args.seq),
        "--micro-batch-size", str(args.micro_batch_size), "--global-batch-size", str(args.micro_batch_size * dp * args.micro_batches),
        "--pipeline-model-parallel-size", str(args.pp), "--data-parallel-size", str(dp), "--gpus-per-node", str(args.per_node),
        "--untie-embeddings-and-output-weights",
    ]  # fmt: skip
    if args.pp > 1 and args.vp > 1:
        options += ["--num-virtual-stages-per-pipeline-rank", str(args.vp)]
    return options


def describe(args, folder: Path):
    path = folder / "workload.json"
    limit = ["--limit-device-bytes", str(args.device_bytes)] if args.device_bytes else []
    command = [sys.executable, "-m", "megatron_ext", "describe", "--out", str(path), "--zero-stage", str(args.zero_stage), *limit, *model_options(args)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(ROOT / ".megatron")})
    if done.returncode:
        raise InputError(done.stderr.strip().splitlines()[-1], field="describe", value=done.returncode)
    return workload_file.load(path)


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
        folder = Path(temporary)
        work = describe(args, folder)
        emulation = Emulation(nodes, args, folder)
        task = bar.add_task(f"{gbit_s:g} Gbit/s: measuring", total=None)
        table = emulation.measure(work)
        kinds: dict[str, Path | None] = {"stock": None} if work.zero_stage == 1 else {}
        schedules, skipped = {}, {}
        for policy in args.policies:
            try:
                schedules[policy] = plan(work, table, policy)
            except InputError as error:
                skipped[policy] = str(error)
                continue
            kinds[policy] = folder / f"{policy.replace(':', '-')}.schedule.json"
            schedule_file.save(kinds[policy], schedules[policy])
        bar.update(task, description=f"{gbit_s:g} Gbit/s: training", total=len(kinds) * (1 + args.rounds), completed=0)
        found = {kind: {"iteration_us": [], "exposed_us": [], "gather_us": [], "sent": []} for kind in kinds}
        for kind, path in kinds.items():  # also fills caches
            found[kind]["short"] = emulation.train(kind.replace(":", "-"), SHORT, path)["sent_bytes"]
            bar.advance(task)
        for number in range(args.rounds):
            for kind in list(kinds) if number % 2 == 0 else list(kinds)[::-1]:
                trace = folder / "run.trace.json"
                metrics = emulation.train(kind.replace(":", "-"), args.iters, kinds[kind], trace)
                measured, skip = MeasuredTrace(trace, work.parallel, args.iters), warm_up(args.iters)
                figures = found[kind]
                figures["iteration_us"] += metrics["iteration_us"][skip:]
                figures["exposed_us"] += measured.thread_us(("wait",))[skip:]
                figures["gather_us"] += measured.thread_us(("issue", "wait"))[skip:]
                figures["sent"].append((metrics["sent_bytes"] - figures["short"]) / (args.iters - SHORT))
                figures["loss"], figures["parameter_sha256"] = metrics["loss"], metrics["parameter_sha256"]
                bar.advance(task)
        rows = [row_of(kind, found, work, table, schedules.get(kind)) for kind in kinds]
        against_plan(rows)
        return {"gbit_s": gbit_s, "load_before": load, "load_after": os.getloadavg()[0], "rows": rows, "skipped": skipped, "cost_table": files.load(folder / "cost_table.json", dict)}


def row_of(kind: str, found: dict, work, table, schedule) -> dict:
    """The figures of one policy beside the baseline's."""
    base = "stock" if "stock" in found else "all-gpu" if "all-gpu" in found else kind
    figures = found[kind]
    predicted = schedule.predicted.step_time_us if schedule else simulator.simulate(work, table, extrapolate=True).step_time_us
    measured = summarize(figures["iteration_us"])
    sent = sum(figures["sent"]) / len(figures["sent"])
    row = {
        "policy": kind, "baseline": base, **{name: summarize(figures[name]).as_json() for name in ("iteration_us", "exposed_us", "gather_us")},
        "ratio": measured.median_us / summarize(found[base]["iteration_us"]).median_us,
        "predicted_us": predicted, "prediction_error": predicted / measured.median_us - 1,
        "sent_bytes_per_iteration": sent, "loss": figures["loss"], "same_parameters": figures["parameter_sha256"] == found[base]["parameter_sha256"],
    }  # fmt: skip
    row["planned_parameter_bytes"] = planned_network_bytes(schedule or stock_schedule(work))
    if schedule:
        row |= {
            "lower_bound_us": schedule.predicted.lower_bound_us,
            "over_bound": measured.median_us / schedule.predicted.lower_bound_us - 1 if schedule.predicted.lower_bound_us else None,
        }  # fmt: skip
    return row


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
    add("--iters", type=int, default=16)
    add("--rounds", type=int, default=2)
    add("--measure-seconds", type=float, default=30)
    add("--out", type=Path, default=None)
    args = parser.parse_args()
    os.chdir(ROOT)
    try:
        check_possible()
        if args.iters <= SHORT or args.rounds < 1:
            raise InputError(f"expected more than {SHORT} iterations and at least one round", field="--iters", value=args.iters)
        if not Path(f"{CORPUS}.idx").exists():
            raise InputError("is not there yet: scripts/pretrain_gpt_hybrid.sh builds it", file=CORPUS)
        model_options(args)
        before = os.getloadavg()[0]
        with Progress(console=Console(stderr=True)) as bar:
            rates = [one_rate(gbit_s, args, bar) for gbit_s in args.gbit]
    except InputError as error:
        print(f"emulated_cluster: {error}", file=sys.stderr)
        return 2
    except RuntimeError as error:
        print(f"emulated_cluster: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    name = "emulated_cluster" + ("" if (args.nodes, args.per_node, args.pp, args.zero_stage) == (2, 2, 1, 1) else f"_{args.nodes}x{args.per_node}_pp{args.pp}_zero{args.zero_stage}")
    out = args.out or ROOT / "benchmarks" / "results" / f"{name}.json"
    options = {key: value for key, value in vars(args).items() if key != "out"}
    files.save(out, {"about": about_this_machine(load_before=before), "emulated": True, "options": options, "rates": rates}, indent=1)
    pictures.draw(out)
    show(rates)
    return 0


def show(rates: list[dict]) -> None:
    table = Table("Gbit/s", "policy", "iteration ms (p10 - p90)", "ratio", "exposed ms", "predicted ms", "sent MB an iteration", "saved MB, planned", "parameters", title="emulated cluster")
    for rate in rates:
        for row in rate["rows"]:
            us = row["iteration_us"]
            table.add_row(
                f"{rate['gbit_s']:g}", row["policy"], f"{us['median_us'] / 1e3:.1f} ({us['p10_us'] / 1e3:.1f} - {us['p90_us'] / 1e3:.1f})", f"{row['ratio']:.3f}",
                f"{row['exposed_us']['median_us'] / 1e3:.1f}", f"{row['predicted_us'] / 1e3:.1f} ({row['prediction_error']:+.0%})",
                f"{row['sent_bytes_per_iteration'] / 1e6:.2f}", f"{row['saved_bytes'] / 1e6:.3f}, {row['planned_saved_bytes'] / 1e6:.3f}", "equal" if row["same_parameters"] else "differ",
            )  # fmt: skip
        for policy, reason in rate["skipped"].items():
            table.add_row(f"{rate['gbit_s']:g}", policy, f"not applicable: {reason}")
    console = Console(width=170)
    console.print(table)
    rows = [row for rate in rates for row in rate["rows"]]
    console.print(f"predicted iteration time: at most {max(abs(row['prediction_error']) for row in rows):.1%} off")
    for rate in rates:
        by_policy = {row["policy"]: row["iteration_us"]["median_us"] for row in rate["rows"]}
        if "hybrid" in by_policy:
            best = min(by_policy, key=by_policy.get)
            console.print(f"{rate['gbit_s']:g} Gbit/s: hybrid takes {by_policy['hybrid'] / by_policy[best] - 1:.1%} longer than the best policy, {best}")


if __name__ == "__main__":
    sys.exit(main())
