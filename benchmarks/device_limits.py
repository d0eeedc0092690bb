"""Plans within limits of device memory in all: memory bill beside census, and iteration time beside stock Megatron's.

    .venv/bin/python benchmarks/device_limits.py [--rounds 2] [--iters 8] [--layouts pp2 dp4 one] [--percent 50]
        [--loss-iters 200]

``limits.device_bytes`` is 100, 70, 50, 30 and 20 % of what stock Megatron holds without activations, at PP 2 x VP 2 x
DP 2 and at DP 4, in bfloat16 with recompute. With one rank it is a fifth of the model's parameters and gradients. For
every limit the plan that is fastest as predicted is trained, of all zero stages, with the optimizer on the device and
on the host: the latter leaves room for whole gradients, which are reduced once an iteration. All runs are interleaved,
in the opposite order every other round. At last the losses of gradients that are reduced at every visit are set beside
stock's, in float32, and those of stock with another order of sums. Writes benchmarks/results/device_limits.json and its
picture. Ends with 1 where a census is more than 2 % off its bill or over its limit, or where losses of one layout
differ by more than 1e-3 in bfloat16.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from statistics import median

import pictures
from machine import about_this_machine
from main_job import train
from measuring import CORPUS, measure_command
from msgspec.structs import replace
from rich.console import Console
from rich.table import Table

from megatron_ext.cost import cost_table as cost
from megatron_ext.formats import json_files
from megatron_ext.formats.errors import InputError
from megatron_ext.planner import plan
from megatron_ext.planner.stock import stock_schedule
from megatron_ext.report.spread import summarize, warm_up
from megatron_ext.schedule import user_defined_schedule as schedule_file
from megatron_ext.schedule import validate
from megatron_ext.schedule.memory_bill import memory_bill
from megatron_ext.workload import workload as workload_file
from megatron_ext.workload.bucket_rules import layer_buckets
from megatron_ext.workload.workload import Limits, Workload

ROOT = Path(__file__).resolve().parents[1]
PP2 = ["--pipeline-model-parallel-size", "2", "--num-virtual-stages-per-pipeline-rank", "2"]
LAYOUTS = {"pp2": (PP2, 2), "dp4": ([], 4), "one": ([], 1)}
"""Options and data-parallel size."""
PERCENT = (100, 70, 50, 30, 20)
HIDDEN, SEQ = 192, 32
SIZES = f"--hidden-size {HIDDEN} --num-attention-heads 4 --seq-length {SEQ} --micro-batch-size 1 --global-batch-size 8"
MODEL = [*SIZES.split(), "--untie-embeddings-and-output-weights"]
RECOMPUTE = "--bf16 --recompute-granularity full --recompute-method uniform --recompute-num-layers 1".split()
OFFLOAD = ["--optimizer-cpu-offload"]


class Layout:
    """One layout of the processes: its workload, its costs, its plans and its runs.

    Args:
        folder: where files of runs go.
    """

    def __init__(self, name: str, folder: Path, options: list[str]):
        self.name, self.folder = name, folder
        parallel, dp = LAYOUTS[name]
        self.options = [*options, *parallel]
        self.world = dp * (2 if parallel else 1)
        self.work = self._describe(["--data-parallel-size", str(dp)])
        stock = replace(self.work, zero_stage=1)
        self.stock = max(
            (bill.memory for bill in memory_bill(stock_schedule(stock), stock)), key=lambda m: m.device_total_bytes
        )

    def _describe(self, options: list[str]) -> Workload:
        path = self.folder / f"{self.name}.workload.json"
        self._run(["megatron_ext", "describe", "--out", str(path), "--zero-stage", "3", *self.options, *options])
        return workload_file.load(path)

    def _run(self, command: list[str]) -> None:
        environment = os.environ | {"PYTHONPATH": str(ROOT / ".megatron"), "PYTHONWARNINGS": "ignore"}
        done = subprocess.run([sys.executable, "-m", *command], capture_output=True, text=True, env=environment)
        if done.returncode:
            raise RuntimeError((done.stderr.strip().splitlines() or ["no output"])[-1])

    def measure(self, seconds: float) -> None:
        path = self.folder / f"{self.name}.cost_table.json"
        command = measure_command(
            path, self.work, self.options, hidden=HIDDEN, seq=SEQ, micro_batch_size=1, seconds=seconds
        )
        self._run(command)
        self.table = cost.load(path)

    def limits(self, percents: Iterable[int]) -> dict[str, int]:
        """By name, bytes of device memory in all."""
        if self.world == 1:
            parameters = [p for chunk in self.work.chunks for p in chunk.parameters]
            gradients = sum(p.numel for p in parameters) * self.work.optimizer.gradient_item_bytes
            return {"a fifth": (sum(p.bytes for p in parameters) + gradients) // 5}
        held = self.stock.device_total_bytes - self.stock.device_bytes["activations"]
        return {f"{percent} %": held * percent // 100 for percent in percents}

    def plan(self, limit: int):
        """The schedule within ``limit`` that is fastest as predicted, and its workload: of all zero stages, with the
        optimizer on the device and on the host.

        Raises:
            InputError: nothing fits.
        """
        refused, found = None, []
        for on_host in (False, True):
            for zero_stage in (1, 2, 3):
                work = replace(
                    self.work,
                    zero_stage=zero_stage,
                    limits=Limits(device_bytes=limit),
                    optimizer=replace(self.work.optimizer, on_host=on_host),
                )
                try:
                    found.append((plan(work, self.table, extrapolate=True), work))
                except InputError as error:
                    refused = error
        if not found:
            assert refused is not None
            raise refused
        return min(found, key=lambda item: item[0].predicted.iteration_time_us)

    def train(self, name: str, iterations: int, *more: str) -> dict:
        options = ["--init-by-name", *self.options, *more]
        return train(options, self.folder, f"{self.name}-{name}".replace(" ", ""), iterations, self.world)


def run_layout(layout: Layout, args) -> list[dict]:
    """Rows of one layout, stock Megatron's first."""
    rows, commands = [{"layout": layout.name, "limit": "stock", "bill": layout.stock.device_bytes}], {"stock": []}
    for name, limit in layout.limits(args.percent).items():
        row = {"layout": layout.name, "limit": name, "limit_bytes": limit}
        rows.append(row)
        try:
            schedule, work = layout.plan(limit)
        except InputError as error:
            row["refused"] = str(error)
            print(f"{layout.name} {name}: {error}", file=sys.stderr, flush=True)
            continue
        path = layout.folder / f"{layout.name}-{limit}.schedule.json"
        schedule_file.save(path, schedule)
        on_host = work.optimizer.on_host
        row |= settings_of(schedule) | {"zero_stage": work.zero_stage, "optimizer_on_host": on_host}
        row["bills"] = [bill.memory.device_bytes for bill in memory_bill(schedule, work)]
        commands[name] = ["--user-defined-schedule", str(path), *(OFFLOAD if on_host else [])]
    found: dict[str, list[dict]] = {name: [] for name in commands}
    for number in range(args.rounds):
        for name in list(commands) if number % 2 == 0 else list(commands)[::-1]:
            print(f"{layout.name}, round {number + 1}: {name}", file=sys.stderr, flush=True)
            found[name].append(layout.train(name, args.iters, *commands[name]))
    skip = warm_up(args.iters)
    for row in rows:
        if runs := found.get(row["limit"]):
            row["iteration_us"] = summarize([us for run in runs for us in run["iteration_us"][skip:]]).as_json()
            row["round_medians_us"] = [summarize(run["iteration_us"][skip:]).median_us for run in runs]
            row["loss"] = runs[-1]["loss"]
            pairs = zip(row["loss"], found["stock"][-1]["loss"])
            row["loss_difference"] = max(abs(ours - stock) / stock for ours, stock in pairs)
            row["to_stock"] = [m / s for m, s in zip(row["round_medians_us"], rows[0]["round_medians_us"])]
            if "bills" in row:
                compare(row, runs)
    return rows


def compare(row: dict, runs: list[dict]) -> None:
    """Adds to ``row`` the census at its largest: of the ranks of every stage the one that holds most."""
    held = [memory["device_bytes"] for memory in runs[-1]["census"]]
    ranks = len(held) // len(row["bills"])
    stages = [held[stage * ranks : (stage + 1) * ranks] for stage in range(len(row["bills"]))]
    censuses = [max(of_stage, key=lambda memory: sum(memory.values())) for of_stage in stages]
    row["censuses"] = censuses
    row["bill_to_census"] = [sum(bill.values()) / sum(held.values()) for bill, held in zip(row["bills"], censuses)]
    row["device_bytes"] = max(sum(held.values()) for held in censuses)
    row["host_bytes"] = max(sum(memory["host_bytes"].values()) for memory in runs[-1]["census"])


def settings_of(schedule) -> dict:
    """How much of the parameters has which setting, by bytes, and what comes by which route."""
    total = sum(group.bytes for group in schedule.groups)
    share = lambda chosen: round(sum(group.bytes for group in schedule.groups if chosen(group)) / total, 3)
    routes: dict[str, int] = {}
    for rank in schedule.ranks:
        for entry in (rank.start, *rank.steps):
            for action in entry.unshard:
                routes[action.route] = routes.get(action.route, 0) + schedule.groups[action.group].bytes
    return {
        "gradients_sharded": share(lambda group: group.gradients == "sharded"),
        "gradients_on_host": share(lambda group: group.gradients == "host"),
        "shards_on_host": share(lambda group: group.shard_rests == "host"),
        "bytes_by_route": routes,
        "predicted_us": schedule.predicted.iteration_time_us,
    }


def losses(folder: Path, iterations: int) -> dict:
    """Stock Megatron beside gradients that are all reduced at every visit, in float32; and, as a control, beside stock
    Megatron with the same samples in micro-batches of two: another valid order of the same sums."""
    layout = Layout("pp2", folder, ["--num-layers", "4", *MODEL])
    schedule = replace(stock_schedule(replace(layout.work, zero_stage=1), layer_buckets), zero_stage=2)
    schedule = replace(schedule, groups=tuple(replace(group, gradients="sharded") for group in schedule.groups))
    schedule_file.save(folder / "sharded.json", validate.validate(schedule))
    stock = layout.train("losses-stock", iterations)
    ours = layout.train("losses-sharded", iterations, "--user-defined-schedule", str(folder / "sharded.json"))
    control = layout.train("losses-control", iterations, "--micro-batch-size", "2")
    norms = [abs(a - b) / abs(b) for a, b in zip(ours["grad_norm"], stock["grad_norm"])]
    differences, of_control = (
        [abs(a - b) / abs(b) for a, b in zip(run["loss"], stock["loss"])] for run in (ours, control)
    )
    return {
        "iterations": iterations,
        "stock": stock["loss"],
        "sharded": ours["loss"],
        "control": control["loss"],
        "first_gradient_norm_difference": norms[0],
        "largest_loss_difference": max(differences),
        "median_loss_difference": median(differences),
        "largest_control_difference": max(of_control),
        "median_control_difference": median(of_control),
    }


def show(result: dict) -> None:
    table = Table("layout", "limit", "MB", "zero", "bill / census", "to stock, rounds", "routes", "host MB")
    for row in result["rows"]:
        if "bill_to_census" in row:
            table.add_row(
                row["layout"],
                row["limit"],
                f"{row['limit_bytes'] / 1e6:.1f}",
                f"{row['zero_stage']}{', offload' if row['optimizer_on_host'] else ''}",
                ", ".join(f"{ratio:.3f}" for ratio in row["bill_to_census"]),
                ", ".join(f"{ratio:.2f}" for ratio in row["to_stock"]),
                " ".join(row["bytes_by_route"]),
                f"{row['host_bytes'] / 1e6:.1f}",
            )
        elif "refused" in row:
            table.add_row(row["layout"], row["limit"], f"{row['limit_bytes'] / 1e6:.1f}", "", "refused")
    Console(width=140).print(table)
    if result["losses"]:
        found = result["losses"]
        print(
            f"losses over {found['iterations']} iterations in float32: at most {found['largest_loss_difference']:.1e} "
            f"from stock's, first gradient norm {found['first_gradient_norm_difference']:.1e}; stock's with another "
            f"order of sums at most {found['largest_control_difference']:.1e}"
        )


def holds(result: dict) -> bool:
    """Every limit was kept, every bill is right, and all losses of a layout are the same within rounding."""
    return all(
        "refused" not in row
        and row["loss_difference"] < 1e-3
        and ("bills" not in row or row["device_bytes"] <= row["limit_bytes"])
        and all(abs(ratio - 1) <= 0.02 for ratio in row.get("bill_to_census", ()))
        for row in result["rows"]
    )


def save(path: Path, result: dict) -> None:
    json_files.save(path, result, indent=1)
    pictures.draw(str(path))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--rounds", type=int, default=2)
    add("--iters", type=int, default=8)
    add("--layouts", nargs="+", choices=list(LAYOUTS), default=list(LAYOUTS))
    add("--layers", type=int, default=16)
    add("--percent", type=int, nargs="+", default=PERCENT, help="Limits, of what stock Megatron holds.")
    add("--loss-iters", type=int, default=200, help="0: leave the losses out.")
    add("--measure-seconds", type=float, default=10, help="For the cost table of one layout.")
    add("--out", type=Path, default=ROOT / "benchmarks" / "results" / "device_limits.json")
    args = parser.parse_args()
    args.out = args.out.resolve()
    os.chdir(ROOT)
    if not Path(f"{CORPUS}.idx").exists():
        print("device_limits: there is no corpus yet: scripts/pretrain_gpt_hybrid.sh builds it", file=sys.stderr)
        return 2
    load = os.getloadavg()[0]
    result = {"about": about_this_machine(load_before=load), "options": vars(args) | {"out": ""}, "rows": []}
    result["losses"] = None
    with tempfile.TemporaryDirectory() as temporary:
        for name in args.layouts:
            layout = Layout(name, Path(temporary), ["--num-layers", str(args.layers), *MODEL, *RECOMPUTE])
            layout.measure(args.measure_seconds)
            result["rows"] += run_layout(layout, args)
            save(args.out, result)
        if args.loss_iters:
            result["losses"] = losses(Path(temporary), args.loss_iters)
            save(args.out, result)
    show(result)
    return 0 if holds(result) else 1


if __name__ == "__main__":
    sys.exit(main())
