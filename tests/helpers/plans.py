"""Cost tables, workloads and schedules for tests. The costs are made up and say so."""

import io
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

from training import run, run_warm
from warm_python import IMPORTED, warm_children

from megatron_ext import planner
from megatron_ext.cli import main as cli
from megatron_ext.cost.cost_table import Compute, CostTable, Curve, GroupOverhead, Metadata, Point, Publish, Routes
from megatron_ext.megatron import describe_from_checkout
from megatron_ext.schedule import user_defined_schedule as schedule_file
from megatron_ext.workload import workload as workload_file


def made_up_table(gpu_us_per_mib: float = 1000.0, cpu_us_per_mib: float = 300.0) -> CostTable:
    """A synthetic table that offers the gpu and the cpu route from 256 B to 1 GiB."""

    def curve(us_per_mib: float, fixed_us: float) -> Curve:
        sizes = [1 << power for power in range(8, 31)]
        return Curve(
            points=tuple(Point(size_bytes=size, p50_us=fixed_us + us_per_mib * size / 2**20) for size in sizes)
        )

    return CostTable(
        schema_version=2,
        kind="cost_table",
        metadata=Metadata(synthetic=True),
        routes=Routes(gpu=curve(gpu_us_per_mib, 200), cpu=curve(cpu_us_per_mib, 50)),
        publish=Publish(cpu=curve(cpu_us_per_mib / 2, 30)),
        group_overhead=GroupOverhead(call_us=20),
        compute=tuple(
            Compute(layer_kind=kind, forward_us=2000, backward_us=4000)
            for kind in ("embedding", "transformer", "output")
        ),
        p2p=curve(500, 100),
    )


LOCAL = ["--transformer-impl", "local"]
"""What the example trains; Megatron's default is Transformer Engine's layers."""


def describe(path: Path, options: list[str]) -> workload_file.Workload:
    """Write and read the workload of a real model; of the example's layers, where ``options`` say nothing of them."""
    result = command_line("describe", "--out", path, *LOCAL, *options)
    assert result.returncode == 0, result.stderr
    return workload_file.load(path)


def make_schedule(path: Path, workload: workload_file.Workload, policy: str = "hybrid") -> Path:
    """Plan ``workload`` under made-up costs and write the schedule to ``path``."""
    schedule_file.save(path, planner.plan(workload, made_up_table(), policy=policy))
    return path


def command_line(*arguments) -> subprocess.CompletedProcess:
    """Run ``megatron-ext`` as a user does."""
    words = [*map(str, arguments)]
    command = [sys.executable, "-m", "megatron_ext", *words]
    if words[0] != "describe":
        return run(command)
    # By a checkout, or layers in place of Transformer Engine's, Megatron is another than the one imported before.
    if "--checkout" not in words:
        own = "local" in words and "transformer_engine" not in words
        return run_warm(command, imported=IMPORTED if own else "torch")
    out, error = io.StringIO(), io.StringIO()
    with warm_children(describe_from_checkout, "torch"), redirect_stdout(out), redirect_stderr(error):
        code = cli.main(words)
    return subprocess.CompletedProcess(command, code, out.getvalue(), error.getvalue())
