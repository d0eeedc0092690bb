"""A picture of simulated gain: network rate across, micro-batch size up. Part of simulated_clusters.py."""

from pathlib import Path

import msgspec
from model_shapes import make_workload
from systems import PUBLISHED, System, cost_table, line

from megatron_ext import planner
from megatron_ext.cost import cost_table as cost
from megatron_ext.planner.evaluate import evaluate

MODEL, LAYERS, LAYERS_KEPT = "llama-70b", 16, 4
NETWORK_GB_S = (12.5, 25, 50, 100, 200, 400)
"""Rate of an all-gather over two nodes (one network card a node up to eight fast ones)."""
TOKENS = (512, 1024, 2048, 4096, 8192, 16384)


def grid_cells() -> list[tuple[float, int, int]]:
    """Every (network rate in GB/s, tokens of a micro-batch, zero stage) of the picture."""
    return [(rate, tokens, 3) for tokens in TOKENS for rate in NETWORK_GB_S]


def picture_point(rate: float, tokens: int, zero_stage: int) -> dict:
    """Simulated gain of one cell: sixteen of Llama 70B's layers without
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
    stock = evaluate(work, table, extrapolate=True, bound_us=0.0).iteration_time_us
    return {
        "simulated": True,
        "model": MODEL,
        "network_gb_s": rate,
        "tokens": tokens,
        "zero_stage": zero_stage,
        "stock_us": stock,
        "hybrid_us": planned.predicted.iteration_time_us,
        "gain": 1 - planned.predicted.iteration_time_us / stock,
    }


def draw(points: list[dict], path: Path) -> None:
    """Write the picture to ``path``; every cell carries its gain in per cent."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    gains = {(p["tokens"], p["network_gb_s"]): 100 * p["gain"] for p in points}
    figure = Figure(figsize=(8, 5.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    image = axes.imshow(
        [[gains[t, r] for r in NETWORK_GB_S] for t in TOKENS], origin="lower", aspect="auto", cmap="viridis", vmin=0
    )
    bright = 0.6 * max(max(gains.values()), 1)
    for y, tokens in enumerate(TOKENS):
        for x, rate in enumerate(NETWORK_GB_S):
            gain = gains[tokens, rate]
            axes.text(x, y, f"{gain:.0f} %", ha="center", va="center", color="black" if gain > bright else "white")
    axes.set_xticks(range(len(NETWORK_GB_S)), [f"{rate:g}" for rate in NETWORK_GB_S])
    axes.set_yticks(range(len(TOKENS)), [str(tokens) for tokens in TOKENS])
    axes.set_xlabel("all-gather over two nodes, GB/s")
    axes.set_ylabel("tokens of a micro-batch")
    axes.set_title(
        f"SIMULATED: iteration time that a hybrid plan saves over stock\n{MODEL}, zero stage "
        f"{points[0]['zero_stage']}, 2 x 8 H100, costs from published figures"
    )
    figure.colorbar(image, label="gain, %")
    figure.savefig(path, dpi=140)
