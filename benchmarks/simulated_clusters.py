"""SIMULATED clusters: where hybrid plans win, by how much, and where they do not help.

    python benchmarks/simulated_clusters.py [--models llama-70b] [--systems tcpx-h100]

Nothing here was measured: costs are made from published figures (benchmarks/systems.py and
benchmarks/data/published_links.json, each figure with its source), shapes from papers
(benchmarks/model_shapes.py), times from the project's event engine. A row says what a hybrid
plan gains over the faster of stock Megatron with and without ``--overlap-param-gather`` (zero
stage 3, which stock Megatron does not have: over the best plan by all-gathers alone), how far it
is from the bound that the planner proves, and from the physical limit: all links of a rank busy
at their best rate at once, without latency or disturbance. ``timing`` is what the best plan by
all-gathers alone gains over stock Megatron (zero stage 3: over gathering every layer anew),
``routes`` what the hybrid plan gains beyond that plan.
Writes benchmarks/results/simulated_clusters.json and .png.
"""

import argparse
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

import machine
import msgspec
from model_shapes import SHAPES, make_workload, state_bytes
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from systems import PUBLISHED, SYSTEMS, System, all_links_busy, cost_table, line

from megatron_ext import planner
from megatron_ext.bounds.lower_bound import lower_bound
from megatron_ext.cost import cost_table as cost
from megatron_ext.planner.stock import stock_schedule
from megatron_ext.planner.verdict import compare_with
from megatron_ext.simulator.simulation import simulate
from megatron_ext.simulator.timing import Timing

RESULT = Path(__file__).parent / "results" / "simulated_clusters.json"
HELPS_FROM = 0.02
"""A smaller gain is called no help: published costs are not known better than that."""


class Layout(NamedTuple):
    """Parallel sizes of a row; ``dp`` is the system's ranks over ``tp``."""

    model: str
    zero_stage: int
    pp: int
    vp: int
    microbatches: int
    tokens: int
    tp: int = 1


LAYOUTS = (
    Layout("llama-70b", 1, 8, 5, 16, 4096),
    Layout("llama-70b", 3, 4, 5, 4, 4096),
    Layout("gpt3-175b", 1, 8, 6, 8, 2048, 8),
    Layout("gpt3-175b", 3, 8, 1, 4, 2048),
    Layout("llama-405b", 1, 9, 7, 9, 8192, 8),
    Layout("llama-405b", 3, 21, 1, 4, 8192),
)


def simulated_row(layout: Layout, name: str) -> dict:
    """One layout on one system: planned, simulated and judged. Times in microseconds."""
    system = SYSTEMS[name]
    work = make_workload(
        layout.model,
        zero_stage=layout.zero_stage,
        pp=layout.pp,
        vp=layout.vp,
        dp=system.ranks // layout.tp,
        tp=layout.tp,
        microbatches=layout.microbatches,
        tokens=layout.tokens,
    )
    assert state_bytes(work) < system.memory_gb * 1e9, f"{layout} does not fit {system.title}"
    table = cost_table(system, layout.model, layout.tokens, tp=layout.tp)
    planned = planner.plan(work, table, extrapolate=True)
    predicted = planned.predicted
    limit = lower_bound(work, Timing(work, all_links_busy(system, table), extrapolate=True))
    timing = Timing(work, table, extrapolate=True)
    against = compare_with(work, timing, planned)
    naive = simulate(work, timing, against.other[1] if layout.zero_stage == 1 else stock_schedule(work))
    gathers_only, _, gathers_us = against.gathers
    compared_with, _, compared_us = against.other
    gain = 1 - predicted.iteration_time_us / compared_us
    return {
        "simulated": True,
        "system": name,
        "title": system.title,
        **layout._asdict(),
        "dp": work.parallel.dp,
        "stock_us": naive.iteration_time_us if layout.zero_stage == 1 else None,
        "layers_anew_us": naive.iteration_time_us if layout.zero_stage == 3 else None,
        "hybrid_us": predicted.iteration_time_us,
        "baselines_us": predicted.baselines_us,
        "gathers_only": gathers_only,
        "gathers_only_us": gathers_us,
        "compared_with": compared_with,
        "compared_with_us": compared_us,
        "stock_by_option_us": against.by_option_us or None,
        "gain_of_timing": 1 - gathers_us / naive.iteration_time_us,
        "gain_of_routes": (gathers_us - predicted.iteration_time_us) / compared_us,
        "gain": gain,
        "helps": gain >= HELPS_FROM,
        "bound_us": predicted.lower_bound_us,
        "limit_us": limit,
        "over_bound": predicted.iteration_time_us / predicted.lower_bound_us - 1,
        "over_limit": predicted.iteration_time_us / limit - 1,
        "exposed_naive_us": max(naive.exposed_us),
        "exposed_hybrid_us": max(predicted.exposed_us),
        "left_out": list(predicted.left_out),
        "host_bytes_per_node": max(predicted.peak_bytes.get("pinned_host", (0,)), default=0),
        "state_bytes": state_bytes(work),
    }


MODEL, LAYERS, LAYERS_KEPT = "llama-70b", 16, 4
NETWORK_GB_S = (12.5, 25, 50, 100, 200, 400)
"""Of the picture: rate of an all-gather over two nodes (one network card a node up to eight fast ones)."""
TOKENS = (512, 1024, 2048, 4096, 8192, 16384)


def picture_point(rate: float, tokens: int, zero_stage: int = 3) -> dict:
    """Simulated gain of one cell over the best plan by all-gathers alone: sixteen of Llama 70B's layers without
    pipeline (a longer stack gains the same share), one micro-batch, 2 x 8 H100."""
    system = System(f"2 x 8 H100 at {rate} GB/s", 16, "H100", "2x8 H100 TCPX", rate / 8)
    table = cost_table(system, MODEL, tokens)
    table = cost.check(
        msgspec.structs.replace(
            table,
            routes=cost.Routes(
                gpu=line(PUBLISHED["all_gather_latency_us"]["two nodes"]["value"], rate), cpu=table.routes.cpu
            ),
        )
    )
    work = make_workload(
        MODEL,
        zero_stage=zero_stage,
        pp=1,
        vp=1,
        dp=system.ranks,
        microbatches=1,
        tokens=tokens,
        device_layers=LAYERS_KEPT,
        layers=LAYERS,
    )
    planned = planner.plan(work, table, extrapolate=True)
    gathers_us = compare_with(work, Timing(work, table, extrapolate=True), planned).gathers[2]
    return {
        "simulated": True,
        "model": MODEL,
        "network_gb_s": rate,
        "tokens": tokens,
        "zero_stage": zero_stage,
        "gathers_only_us": gathers_us,
        "hybrid_us": planned.predicted.iteration_time_us,
        "gain": 1 - planned.predicted.iteration_time_us / gathers_us,
    }


def rows_of(models, systems) -> list[tuple[Layout, str]]:
    """Layouts on systems; tensor parallelism over a whole node needs a network for the gathers."""
    return [
        (layout, name)
        for layout in LAYOUTS
        if layout.model in models
        for name in systems
        if layout.tp == 1 or (SYSTEMS[name].nodes > 1)
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="Rows planned at once.")
    parser.add_argument("--out", type=Path, default=RESULT)
    args = parser.parse_args()
    load = os.getloadavg()[0]
    todo = rows_of(args.models, args.systems)
    cells = [(rate, tokens) for tokens in TOKENS for rate in NETWORK_GB_S]
    with ProcessPoolExecutor(args.jobs) as pool, Progress(console=Console(stderr=True)) as bar:
        task = bar.add_task("planning (simulated)", total=len(todo) + len(cells))
        futures = [pool.submit(simulated_row, *item) for item in todo] + [
            pool.submit(picture_point, *cell) for cell in cells
        ]
        for future in futures:
            future.add_done_callback(lambda _: bar.advance(task))
        done = [future.result() for future in futures]
    rows, points = done[: len(todo)], done[len(todo) :]
    result = {"simulated": True, "published": PUBLISHED, "helps_from": HELPS_FROM, "rows": rows, "picture": points}
    args.out.parent.mkdir(exist_ok=True)
    machine.write(args.out, result, load_before=load)
    show(rows)
    return 0


def show(rows: list[dict]) -> None:
    columns = "model; zero; TP x PP x VP x DP; tokens; system; layers anew ms; compared with ms; hybrid ms".split("; ")
    columns += "gain; timing; routes; over bound; over limit; exposed ms -> hybrid; verdict".split("; ")
    table = Table(*columns, title="SIMULATED from published costs")
    for row in rows:
        table.add_row(
            row["model"],
            str(row["zero_stage"]),
            f"{row['tp']} x {row['pp']} x {row['vp']} x {row['dp']}",
            str(row["tokens"]),
            row["title"],
            f"{row['layers_anew_us'] / 1e3:.1f}" if row["layers_anew_us"] else "",
            f"{row['compared_with_us'] / 1e3:.1f}",
            f"{row['hybrid_us'] / 1e3:.1f}",
            f"{row['gain']:.1%}",
            f"{row['gain_of_timing']:.1%}",
            f"{row['gain_of_routes']:.1%}",
            f"{row['over_bound']:.1%}",
            f"{row['over_limit']:.1%}",
            f"{row['exposed_naive_us'] / 1e3:.1f} -> {row['exposed_hybrid_us'] / 1e3:.1f}",
            "helps" if row["helps"] else "does not help",
        )
    console = Console(width=200)
    console.print(table)
    console.print(
        f"hybrid helps (by {HELPS_FROM:.0%} or more) in {sum(row['helps'] for row in rows)} of {len(rows)} rows; in "
        "the others it does not."
    )


if __name__ == "__main__":
    sys.exit(main())
