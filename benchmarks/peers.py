"""What people would use instead, at equal device memory: peers on the same GPT, samples, initial values and machine.

    .venv/bin/python benchmarks/peers.py [--rounds 2] [--iters 4] [--systems NAME ...] [--layers 8 ...] [--gbit 2.5]

Four data-parallel processes, bfloat16, with 1, 4 and 16 micro-batches an iteration. Ours is planned within 100, 50 and
25 % of what stock Megatron holds and within the least that fits; the optimizer is on the host where no plan fits
otherwise. All systems train in turns, in the opposite order every other round. Device bytes are counted from outside,
by the same code for everybody (peer_census.py): parameters, gradients, optimizer states and buffers, without
activations. `ours / theirs` is with our fastest that holds no more device bytes in all. A system that fails is shown
with its reason. DeepSpeed is installed into runs/peers-packages (benchmarks/peer_requirements.txt), never into .venv.
Writes benchmarks/results/peers.json and peers.png. With --gbit, the four processes are two emulated nodes whose link
carries so much each way (benchmarks/emulated_nodes.py, as root), and the files are peers_slow_link.json and .png.
"""

import argparse
import contextlib
import os
import sys
import tempfile
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import machine
from emulated_nodes import Nodes
from measuring import CORPUS, add_model_options
from peer_layouts import PER_NODE, REQUIREMENTS, ROOT, WORLD, Layout, deepspeed_environment
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from megatron_ext.formats.errors import InputError
from megatron_ext.report.spread import summarize, warm_up


class System(NamedTuple):
    """A way to train. ``line``: of the picture; ``percent``: of stock's device bytes, for ours alone (0: the least that
    fits); ``command``: a peer's script and way."""

    title: str
    line: str
    percent: int | None = None
    command: tuple[str, ...] = ()

    @property
    def ours(self) -> bool:
        return self.percent is not None


SYSTEMS = {
    "stock": System("Megatron", "Megatron"),
    "ours-100": System("ours, within 100 %", "ours", 100),
    "ours-50": System("ours, within 50 %", "ours", 50),
    "ours-25": System("ours, within 25 %", "ours", 25),
    "ours-least": System("ours, the least", "ours", 0),
    "fsdp2-reshard": System("FSDP2, one reduce an iteration", "FSDP2", None, ("peer_fsdp.py", "reshard")),
    "fsdp2-every": System("FSDP2", "FSDP2", None, ("peer_fsdp.py", "every")),
    "fsdp2-offload": System("FSDP2, CPUOffloadPolicy", "FSDP2, offload", None, ("peer_fsdp.py", "offload")),
    "deepspeed": System("DeepSpeed ZeRO-3", "DeepSpeed", None, ("peer_deepspeed.py", "zero3")),
    "deepspeed-offload": System(
        "DeepSpeed ZeRO-3, offload", "DeepSpeed, offload", None, ("peer_deepspeed.py", "offload")
    ),
    "megatron-fsdp": System("Megatron-FSDP", "Megatron-FSDP", None, ("peer_fsdp.py", "optim_grads_params")),
}


def train(layout: Layout, name: str, microbatches: int, plans: dict) -> dict:
    system, run = SYSTEMS[name], f"{name}-{microbatches}"
    if system.command:
        script, way = system.command
        environment = deepspeed_environment() if name.startswith("deepspeed") else None
        return layout.train(run, [f"benchmarks/{script}", way], microbatches, environment=environment)
    more: tuple[str, ...] = ()
    if system.ours:
        path, on_host = plans[name, microbatches]
        more = ("--user-defined-schedule", str(path), *(("--optimizer-cpu-offload",) if on_host else ()))
    return layout.train(run, ["benchmarks/peer_megatron.py"], microbatches, more)


def run(args, layout: Layout, bar: Progress) -> tuple[list[dict], dict[str, str], float]:
    """Rows, reasons of those that failed, and the largest load of the machine meanwhile."""
    runs = [(name, count) for count in args.micro_batches for name in SYSTEMS if name in args.systems]
    runs = [key for key in runs if key != ("fsdp2-reshard", 1)]  # the same as every
    task, failed, plans, load = bar.add_task("measuring costs", total=None), {}, {}, 0.0
    layout.measure()
    for name, count in runs:
        if SYSTEMS[name].ours:
            bar.update(task, description=f"planning {name}, {count} micro-batches")
            try:
                plans[name, count] = layout.plan(count, SYSTEMS[name].percent)
            except InputError as error:
                failed[f"{name}-{count}"] = str(error)
    bar.update(task, total=args.rounds * len(runs), completed=0)
    found: dict[tuple[str, int], list[dict]] = {key: [] for key in runs}
    for number in range(args.rounds):
        for name, count in runs if number % 2 == 0 else runs[::-1]:
            bar.update(task, description=f"round {number + 1}: {name}, {count} micro-batches")
            if f"{name}-{count}" not in failed:
                try:
                    found[name, count].append(train(layout, name, count, plans))
                except (RuntimeError, ValueError) as error:
                    failed[f"{name}-{count}"] = " ".join(str(error).split())
            bar.advance(task)
            load = max(load, os.getloadavg()[0])
    rows = [row_of(name, count, done) for (name, count), done in found.items() if f"{name}-{count}" not in failed]
    for row in rows:
        if not SYSTEMS[row["system"]].ours:
            row["opponent"] = opponent_of(row, rows)
    return rows, failed, load


def row_of(name: str, microbatches: int, runs: list[dict]) -> dict:
    """The figures of one system over all rounds, warm-up left out."""
    skip = warm_up(len(runs[0]["iteration_us"]))
    device_bytes, host_bytes = max(tuple(one["held"]) for one in runs)
    return {
        "system": name,
        "title": SYSTEMS[name].title,
        "line": SYSTEMS[name].line,
        "microbatches": microbatches,
        "iteration_us": summarize([us for one in runs for us in one["iteration_us"][skip:]])._asdict(),
        "device_bytes": device_bytes,
        "host_bytes": host_bytes,
        "loss": runs[-1]["loss"],
    }


def opponent_of(row: dict, rows: list[dict]) -> dict | None:
    """Our fastest with as many micro-batches that holds no more device bytes, and how its times compare."""
    fits = [
        other
        for other in rows
        if SYSTEMS[other["system"]].ours
        and other["microbatches"] == row["microbatches"]
        and other["device_bytes"] <= row["device_bytes"]
    ]
    if not fits:
        return None
    best = min(fits, key=lambda other: other["iteration_us"]["median_us"])
    ratio = best["iteration_us"]["median_us"] / row["iteration_us"]["median_us"]
    return {"system": best["system"], "ratio": ratio}


def show(result: dict) -> None:
    console = Console(width=150)
    table = Table("micro-batches", "system", "device MB", "host MB", "iteration ms (p10 - p90)", "ours / this", "loss")
    for row in sorted(result["rows"], key=lambda row: (row["microbatches"], -row["device_bytes"])):
        us, opponent = row["iteration_us"], row.get("opponent")
        against = f"{opponent['ratio']:.2f} by {opponent['system']}" if opponent else "none holds as little"
        table.add_row(
            str(row["microbatches"]),
            row["title"],
            f"{row['device_bytes'] / 1e6:.2f}",
            f"{row['host_bytes'] / 1e6:.2f}",
            f"{us['median_us'] / 1e3:.0f} ({us['p10_us'] / 1e3:.0f} - {us['p90_us'] / 1e3:.0f})",
            "" if "opponent" not in row else against,
            f"{row['loss'][-1]:.4f}",
        )
    console.print(table)
    for name, why in result["failed"].items():
        console.print(f"{name} did not run: {why}", markup=False)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--rounds", type=int, default=2)
    add("--iters", type=int, default=4, help="Timed iterations of one run; the first ones are not counted.")
    add("--micro-batches", type=int, nargs="+", default=[1, 4, 16])
    add("--systems", nargs="+", choices=list(SYSTEMS), default=list(SYSTEMS), metavar="NAME", help=", ".join(SYSTEMS))
    add_model_options(parser)
    add("--heads", type=int, default=4)
    add("--measure-seconds", type=float, default=8, help="For the cost table.")
    add("--timeout", type=float, default=120, help="Seconds that one run may take.")
    add("--keep", type=Path, default=None, help="Keep logs and plans in this new folder.")
    add("--gbit", type=float, default=None, help="Of the link between two emulated nodes. Default: one node.")
    add("--out", type=Path, default=None)
    parser.set_defaults(hidden=192, seq=32, micro_batch_size=1)
    args = parser.parse_args()
    results = ROOT / "benchmarks" / "results" / ("peers_slow_link.json" if args.gbit else "peers.json")
    args.keep, args.out = args.keep and args.keep.resolve(), (args.out or results).resolve()
    os.chdir(ROOT)
    if not Path(f"{CORPUS}.idx").exists():
        print(f"peers: {CORPUS} is not there yet: scripts/pretrain_gpt_hybrid.sh builds it", file=sys.stderr)
        return 2
    # The private tree's, which this process does not import.
    megatron_core = next(iter(metadata.distributions(name="megatron-core", path=[str(ROOT / ".megatron")]))).version
    load_before = os.getloadavg()[0]
    with contextlib.ExitStack() as stack:
        folder = args.keep or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(exist_ok=True)
        nodes = stack.enter_context(Nodes(WORLD // PER_NODE, args.gbit)) if args.gbit else None
        bar = stack.enter_context(Progress(console=Console(stderr=True)))
        rows, failed, load = run(args, Layout(args, folder, nodes), bar)
    about = {
        "load_most": load,
        "peer_packages": REQUIREMENTS.read_text().splitlines()[1:],
        "megatron_core": megatron_core,
    }
    options = {key: value for key, value in vars(args).items() if key not in ("out", "keep")}
    result = {"options": options, "rows": rows, "failed": failed}
    machine.write(args.out, result, load_before=load_before, **about)
    show(result)
    return 0 if rows else 1


if __name__ == "__main__":
    sys.exit(main())
