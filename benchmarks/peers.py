"""What people would use instead: peers on the same GPT, samples, initial values and machine.

    .venv/bin/python benchmarks/peers.py [--rounds 3] [--iters 16] [--systems NAME ...] [--layers 8 --hidden 256 ...]

Four processes in two layouts: PP 2 x VP 2 x DP 2, and DP 4; at DP 4 once more in bfloat16 with the
optimizer and its float32 parameters on the host. Offload in float32 stands among the rows of DP 4: without a
GPU our optimizer is on the host anyway. Each peer has an opponent of ours in its own layout. Cost tables are measured
and plans made first; then all systems train, the order reversed every other round. A system that fails
is shown with its reason. DeepSpeed is installed into runs/peers-packages (benchmarks/peer_requirements.txt), never
into .venv.
Writes benchmarks/results/peers.json and peers.png.
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import peer_packages
from machine import about_this_machine
from measuring import CORPUS, add_model_options
from peer_layouts import LAYOUTS, ROOT, WORLD, Layout
from peer_picture import draw
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from megatron_ext.formats import json_files
from megatron_ext.report.spread import summarize, warm_up

FIGURES = ("iteration_us", "optimizer_us", "gather_us", "exposed_us")


class System(NamedTuple):
    """A way to train. ``keeps``: what it promises of whole parameters, ``zero 1`` (whole through the
    iteration), ``zero 3`` (they come and go) or ``offload`` (zero 3, updated on the host)."""

    title: str
    layout: str
    keeps: str
    ours: bool
    train: Callable[[Layout, str], dict]
    same_model: str = "Megatron's GPTModel"


def ours(zero_stage: int | None, limit: str | None = None, offload: bool = False, policy: str = "hybrid"):
    return lambda layout, name: layout.train_ours(name, zero_stage, limit, offload, policy)


def peer(script: str, way: str):
    return lambda layout, name: layout.train_peer(name, script, way)


def deepspeed(way: str):
    return lambda layout, name: layout.train_peer(name, "peer_deepspeed.py", way, peer_packages.environment())


SYSTEMS = {
    "stock-pp2": System("Megatron, overlapped gathers", "pp2", "zero 1", False, ours(None)),
    "ours-zero1-pp2": System("ours, zero 1", "pp2", "zero 1", True, ours(1)),
    "ours-zero3-pp2": System("ours, zero 3, half", "pp2", "zero 3", True, ours(3, "half")),
    "torch-pp2": System(
        "torch interleaved 1F1B + FSDP2",
        "pp2",
        "zero 1",
        False,
        peer("peer_torch_pipelining.py", "shipped"),
        "the same chunks as torch stages",
    ),
    "torch-one-stage-pp2": System(
        "torch interleaved 1F1B + FSDP2, one stage whole",
        "pp2",
        "zero 3",
        False,
        peer("peer_torch_pipelining.py", "one-stage"),
        "the same chunks as torch stages",
    ),
    "stock-dp4": System("Megatron, overlapped gathers", "dp4", "zero 1", False, ours(None)),
    "ours-zero1-dp4": System("ours, zero 1", "dp4", "zero 1", True, ours(1)),
    "fsdp2-whole-dp4": System(
        "FSDP2, whole through the iteration", "dp4", "zero 1", False, peer("peer_fsdp2.py", "whole")
    ),
    "ours-zero3-dp4": System("ours, zero 3, half", "dp4", "zero 3", True, ours(3, "half")),
    "ours-zero3-two-layers-dp4": System("ours, zero 3, two layers", "dp4", "zero 3", True, ours(3, "two-layers")),
    "ours-zero3-all-gpu-dp4": System(
        "ours, zero 3, half, all-gathers alone", "dp4", "zero 3", True, ours(3, "half", policy="all-gpu")
    ),
    "fsdp2-dp4": System("FSDP2", "dp4", "zero 3", False, peer("peer_fsdp2.py", "reshard")),
    "deepspeed-dp4": System("DeepSpeed ZeRO-3", "dp4", "zero 3", False, deepspeed("zero3")),
    "fsdp2-offload-dp4": System("FSDP2, CPUOffloadPolicy", "dp4", "offload", False, peer("peer_fsdp2.py", "offload")),
    "deepspeed-offload-dp4": System("DeepSpeed ZeRO-3, offload", "dp4", "offload", False, deepspeed("offload")),
    "megatron-fsdp-dp4": System(
        "Megatron-FSDP", "dp4", "zero 3", False, peer("peer_megatron_fsdp.py", "optim_grads_params")
    ),
    "stock-offload": System(
        "Megatron, overlapped gathers, optimizer on the host", "dp4-bf16", "zero 1", False, ours(None, offload=True)
    ),
    "ours-zero1-offload": System(
        "ours, zero 1, optimizer on the host", "dp4-bf16", "zero 1", True, ours(1, offload=True)
    ),
    "ours-offload": System(
        "ours, zero 3, half, optimizer on the host", "dp4-bf16", "offload", True, ours(3, "half", True)
    ),
    "ours-offload-two-layers": System(
        "ours, zero 3, two layers, optimizer on the host", "dp4-bf16", "offload", True, ours(3, "two-layers", True)
    ),
    "fsdp2-offload": System("FSDP2, CPUOffloadPolicy", "dp4-bf16", "offload", False, peer("peer_fsdp2.py", "offload")),
    "deepspeed-offload": System("DeepSpeed ZeRO-3, offload", "dp4-bf16", "offload", False, deepspeed("offload")),
}


def run(args) -> dict:
    names = [name for name in SYSTEMS if name in args.systems]
    # The private tree's, which this process does not import.
    megatron_core = next(iter(metadata.distributions(name="megatron-core", path=[str(ROOT / ".megatron")]))).version
    load, failed = os.getloadavg()[0], {}
    with tempfile.TemporaryDirectory() as temporary, Progress(console=Console(stderr=True)) as bar:
        folder = args.keep or Path(temporary)
        folder.mkdir(exist_ok=True)
        layouts = {
            name: Layout(name, args, folder) for name in LAYOUTS if any(SYSTEMS[s].layout == name for s in names)
        }
        task = bar.add_task("measuring cost tables", total=len(layouts))
        for layout in layouts.values():
            layout.measure()
            bar.advance(task)
        if any(name.startswith("deepspeed") for name in names):
            bar.update(task, description="installing DeepSpeed and letting it build its extension", total=None)
            try:  # a short run compiles what DeepSpeed compiles
                next(layout for layout in layouts.values() if layout.pp == 1).train_peer(
                    "deepspeed-first", "peer_deepspeed.py", "zero3", peer_packages.environment(), 2
                )
            except RuntimeError as error:
                failed |= {name: str(error) for name in names if name.startswith("deepspeed")}
        bar.update(task, description="training", total=args.rounds * len(names), completed=0)
        found: dict[str, list[dict]] = {name: [] for name in names}
        for number in range(args.rounds):
            for name in names if number % 2 == 0 else names[::-1]:
                bar.update(task, description=f"round {number + 1}: {name}")
                if name not in failed:
                    try:
                        found[name].append(SYSTEMS[name].train(layouts[SYSTEMS[name].layout], name))
                    except (RuntimeError, ValueError) as error:
                        failed[name] = " ".join(str(error).split())
                bar.advance(task)
        parameters = {
            name: sum(p.bytes for c in layout.work.chunks for p in c.parameters) for name, layout in layouts.items()
        }
        plans = {name: layout.plans_as_json() for name, layout in layouts.items()}
        limits = {
            name: {limit: layout.whole_parameter_bytes(limit) for limit in ("half", "two-layers")}
            for name, layout in layouts.items()
        }
    rows = [row_of(name, found[name], args) for name in names if name not in failed]
    for row in rows:
        if not SYSTEMS[row["system"]].ours:
            row["opponent"] = opponent_of(row, rows)
    about = about_this_machine(load_before=load) | {
        "load_after": os.getloadavg()[0],
        "peer_packages": peer_packages.REQUIREMENTS.read_text().splitlines()[1:],
        "megatron_core": megatron_core,
    }
    options = {key: value for key, value in vars(args).items() if key not in ("out", "keep")}
    return {
        "about": about,
        "options": options,
        "parameter_bytes": parameters,
        "limits_bytes": limits,
        "plans": plans,
        "rows": rows,
        "failed": failed,
    }


def row_of(name: str, runs: list[dict], args) -> dict:
    """The figures of one system over all rounds, warm-up left out."""
    system, skip = SYSTEMS[name], warm_up(args.iters)
    pooled = {
        figure: summarize([value for one in runs for value in one[figure][skip:]]).as_json() for figure in FIGURES
    }
    return {
        "system": name,
        "title": system.title,
        "layout": system.layout,
        "keeps": system.keeps,
        "ours": system.ours,
        "model": system.same_model,
        **pooled,
        "tokens_per_s": args.global_batch_size * args.seq / pooled["iteration_us"]["median_us"] * 1e6,
        "round_medians_us": [summarize(one["iteration_us"][skip:]).median_us for one in runs],
        "whole_peak_bytes": max(one["whole_peak_bytes"] for one in runs),
        "loss": runs[-1]["loss"],
        "loss_at_end": runs[-1]["loss"][-1],
    }


def opponent_of(row: dict, rows: list[dict]) -> dict | None:
    """Our fastest system of the same layout that holds no more whole parameters, and how its times compare."""
    fits = [
        other
        for other in rows
        if other["ours"] and other["layout"] == row["layout"] and other["whole_peak_bytes"] <= row["whole_peak_bytes"]
    ]
    if not fits:
        return None
    best = min(fits, key=lambda other: other["iteration_us"]["median_us"])
    by_round = [mine / theirs for mine, theirs in zip(best["round_medians_us"], row["round_medians_us"])]
    return {
        "system": best["system"],
        "ratio": best["iteration_us"]["median_us"] / row["iteration_us"]["median_us"],
        "ratio_by_round": by_round,
        "whole_peak_bytes": best["whole_peak_bytes"],
    }


def show(result: dict) -> None:
    console = Console(width=190)
    for layout, (pp, vp, more) in LAYOUTS.items():
        rows = [row for row in result["rows"] if row["layout"] == layout]
        if not rows:
            continue
        about = " ".join(
            [
                f"PP {pp} x VP {vp} x DP {WORLD // pp}: {result['parameter_bytes'][layout] / 1e6:.1f} MB of parameters",
                *more,
            ]
        )
        table = Table(
            "system",
            "keeps",
            "iteration ms (p10 - p90)",
            "tokens/s",
            "gather ms",
            "exposed ms",
            "optimizer ms",
            "whole parameters MB",
            "loss at end",
            "ours / this, rounds",
            "against",
            title=about,
        )
        for row in rows:
            us, opponent = row["iteration_us"], row.get("opponent")
            ratio = (
                f"{opponent['ratio']:.2f} ({min(opponent['ratio_by_round']):.2f} - "
                f"{max(opponent['ratio_by_round']):.2f})"
                if opponent
                else ""
                if row["ours"]
                else "-"
            )
            table.add_row(
                f"[bold]{row['title']}[/]" if row["ours"] else row["title"],
                row["keeps"],
                f"{us['median_us'] / 1e3:.0f} ({us['p10_us'] / 1e3:.0f} - {us['p90_us'] / 1e3:.0f})",
                f"{row['tokens_per_s']:.0f}",
                *(f"{row[figure]['median_us'] / 1e3:.1f}" for figure in ("gather_us", "exposed_us", "optimizer_us")),
                f"{row['whole_peak_bytes'] / 1e6:.2f}",
                f"{row['loss_at_end']:.5f}",
                ratio,
                opponent["system"] if opponent else "" if row["ours"] else "none holds as little",
            )
        console.print(table)
    for name, why in result["failed"].items():
        console.print(f"{name} did not run: {why}")
    console.print("ours / this: our fastest that holds no more whole parameters on a rank; below 1 we are ahead.")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--rounds", type=int, default=3)
    add("--iters", type=int, default=16, help="Iterations of one run; the first two are not counted.")
    add("--systems", nargs="+", choices=list(SYSTEMS), default=list(SYSTEMS), metavar="NAME", help=", ".join(SYSTEMS))
    add_model_options(parser)
    add("--heads", type=int, default=4)
    add("--global-batch-size", type=int, default=16)
    add("--measure-seconds", type=float, default=30, help="For the cost table of one layout.")
    add("--timeout", type=float, default=280, help="Seconds that one run may take.")
    add("--keep", type=Path, default=None, help="Keep logs, plans and traces in this new folder.")
    add("--out", type=Path, default=ROOT / "benchmarks" / "results" / "peers.json")
    args = parser.parse_args()
    if args.rounds < 1 or args.iters < 4:
        parser.error("at least one round of four iterations")
    args.keep, args.out = args.keep and args.keep.resolve(), args.out.resolve()
    os.chdir(ROOT)
    if not Path(f"{CORPUS}.idx").exists():
        print(f"peers: {CORPUS} is not there yet: scripts/pretrain_gpt_hybrid.sh builds it", file=sys.stderr)
        return 2
    try:
        result = run(args)
    except RuntimeError as error:
        print(f"peers: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    json_files.save(args.out, result, indent=1)
    draw(result, args.out.with_suffix(".png"))
    show(result)
    return 0 if result["rows"] else 1


if __name__ == "__main__":
    sys.exit(main())
