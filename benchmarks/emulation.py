"""Training and measuring on the emulated nodes: one folder, one set of nodes, one model."""

import sys
import time
from pathlib import Path
from typing import NamedTuple

from emulated_nodes import Nodes
from interleaved_ab import Figure, Run, interleave, over_slices
from measuring import describe, measure_command, training_command

from megatron_ext.cost import cost_table as cost
from megatron_ext.cpubench.launcher import launch
from megatron_ext.formats import json_files
from megatron_ext.formats import metrics as metrics_file
from megatron_ext.formats.errors import InputError
from megatron_ext.report.equality import compare
from megatron_ext.report.measured_trace import MeasuredTrace
from megatron_ext.workload.workload import Workload

ROOT = Path(__file__).resolve().parents[1]
MEASURE_SECONDS, MEASURE_GBIT = 45, 15
"""A cost table takes so long, and as long as it takes to send so much over a link."""


class Trained(NamedTuple):
    """What one of several interleaved runs was like: figures over its whole iterations, and the bytes that
    were sent while it ran."""

    iteration_us: Figure
    exposed_us: Figure
    gather_us: Figure
    sent_bytes: int
    loss: list[float]
    parameter_sha256: str


class Emulation:
    """One rate: the nodes, the options of the model, and a folder for what comes and goes."""

    def __init__(self, nodes: Nodes, args, folder: Path):
        self.nodes, self.args, self.folder = nodes, args, folder
        self.model = model_options(args)
        self.world = args.nodes * args.per_node
        self.environment = {
            "PYTHONPATH": f"{ROOT}:{ROOT / '.megatron'}",
            "PYTHONWARNINGS": "ignore",
            "TORCH_CPP_LOG_LEVEL": "ERROR",
        } | nodes.environment(args.per_node)

    def run(self, name: str, command: list[str], environment: dict[str, str] | None = None) -> int:
        """Run ``command`` as one rank each, to its end; returns the bytes sent meanwhile, over all nodes.

        Raises:
            RuntimeError: the run failed; the end of its output is in the message.
        """
        before = self.nodes.sent_when_idle()
        log = self.folder / f"{name}.log"
        with open(log, "w") as out:
            code = launch(
                [sys.executable, "benchmarks/enter_node.py", sys.executable, *command],
                self.world,
                stdout=out,
                environment=self.environment | (environment or {}),
            )
        if code:
            raise RuntimeError(f"{name} ended with exit code {code}: {log.read_text()[-1500:]}")
        return self.nodes.sent_when_idle() - before

    def measure(self, work, name: str) -> cost.CostTable:
        """A cost table, measured by all ranks over the shaped links."""
        out = self.folder / f"{name}.json"
        self.run(name, self._measuring(out, work, self.args.measure_seconds or measure_seconds(self.nodes.gbit_s)))
        return cost.load(out)

    def _measuring(self, out: Path, work, seconds: float, links: str | None = None) -> list[str]:
        """What follows ``python``."""
        args = self.args
        return [
            "-m",
            *measure_command(
                out,
                work,
                self.model,
                hidden=args.hidden,
                seq=args.seq,
                micro_batch_size=args.micro_batch_size,
                seconds=seconds,
                links=links,
            ),
        ]

    def train_short(self, kind: str, iterations: int, schedule: Path | None) -> int:
        """A run of few iterations: the bytes that it sends; it also fills caches."""
        return self.run(f"{file_name(kind)}.short", self._training(kind, iterations, schedule))

    def differences(self, kind: str, base: str, iterations: int, schedule: Path) -> tuple[str, ...]:
        """In what the short run of ``kind`` differs from ``base``'s; where that is itself, or has other buckets and
        so other orders of sums, from Megatron's own gathers at the schedule's layout, which are run for it."""
        mine = metrics_file.load(self._metrics(kind))
        found = compare(metrics_file.load(self._metrics(base)), mine).differences
        if found or kind == base:
            reference = f"{kind}.reference"
            self.run(
                file_name(reference),
                self._training(reference, iterations, schedule),
                {"MEGATRON_EXT_STOCK_GATHER": "1"},
            )
            found = compare(metrics_file.load(self._metrics(reference)), mine).differences
        return found

    def train(
        self, kinds: dict[str, Path | None], iterations: int, slice_s: float, work, report, measure_seconds: float
    ) -> tuple[dict[str, Trained], cost.CostTable, dict[int, tuple[float, float]]]:
        """Train by every schedule (None: stock) at once, interleaved, and measure compute interleaved with them;
        ``report(text)`` is told whose slice it is. Returns also what was measured, and when every slice began and ended
        (Unix time, s).

        Raises:
            interleaved_ab.Ended: a run failed.
        """
        runs = {
            kind: Run(
                kind,
                [
                    "benchmarks/enter_node.py",
                    sys.executable,
                    *self._training(kind, iterations, path, "--user-defined-schedule-trace", str(self._trace(kind))),
                ],
                self.world,
                self.folder / f"{file_name(kind)}.log",
                self.environment,
            )
            for kind, path in kinds.items()
        }
        table = self.folder / "cost_table_interleaved.json"
        measuring = [
            "benchmarks/enter_node.py",
            sys.executable,
            *self._measuring(table, work, measure_seconds, "compute"),
        ]
        compute = Run("measuring", measuring, self.world, self.folder / "measuring.log", self.environment)
        everyone = behind_every_second(list(runs.values()), compute)
        sent, before, times, since = dict.fromkeys((run.name for run in everyone), 0), 0, {}, 0.0

        def begin(number: int) -> None:
            nonlocal before, since
            before = self.nodes.sent_when_idle() if number else before
            report(next(run for run in everyone if run.slice == number).name)
            since = time.time()

        def end(number: int) -> None:
            times[number] = (since, time.time())
            sent[next(run for run in everyone if run.slice == number).name] += self.nodes.sent_when_idle() - before

        before = self.nodes.sent_when_idle()
        interleave(everyone, slice_s, between=end, report=begin)
        return (
            {kind: self._trained(kind, run, iterations, slice_s, sent[kind], work) for kind, run in runs.items()},
            cost.load(table),
            times,
        )

    def _trained(self, kind: str, run: Run, iterations: int, slice_s: float, sent_bytes: int, work) -> Trained:
        metrics, trace = (
            json_files.load(self._metrics(kind), dict),
            MeasuredTrace(self._trace(kind), work.parallel, iterations),
        )
        us = metrics["iteration_us"]
        figures = [
            over_slices(run, us, figure, slice_s, warm_up=self.args.warm_up)
            for figure in (us, trace.thread_us(("wait",)), trace.thread_us(("issue", "wait")))
        ]
        return Trained(*figures, sent_bytes, metrics["loss"], metrics["parameter_sha256"])

    def _training(self, kind: str, iterations: int, schedule: Path | None, *more: str) -> list[str]:
        by = ["--user-defined-schedule", str(schedule)] if schedule else []
        return training_command(self.model, iterations, self._metrics(kind), *by, *more)

    def _metrics(self, kind: str) -> Path:
        return self.folder / f"{file_name(kind)}.metrics.json"

    def _trace(self, kind: str) -> Path:
        return self.folder / f"{file_name(kind)}.trace.json"


def behind_every_second(runs: list[Run], compute: Run) -> list[Run]:
    """The order of slices: ``compute`` comes often in a round, for the machine's speed changes within one."""
    pairs = [runs[first : first + 2] for first in range(0, len(runs), 2)]
    return [run for pair in pairs for run in (*pair, compute)]


def measure_seconds(gbit_s: float) -> float:
    """Enough for as many rounds over a slow network as over a fast one."""
    return MEASURE_SECONDS + MEASURE_GBIT / gbit_s


def file_name(kind: str) -> str:
    return kind.replace(":", "-")


def model_options(args) -> list[str]:
    """The example's options for the asked layout; every data-parallel group crosses nodes."""
    world = args.nodes * args.per_node
    dp = world // args.pp
    if world % args.pp or dp <= args.per_node:
        raise InputError(
            f"with {args.nodes} nodes of {args.per_node} ranks, no data-parallel group would cross nodes",
            field="--pp",
            value=args.pp,
        )
    options = [
        "--num-layers",
        str(args.layers),
        "--hidden-size",
        str(args.hidden),
        "--num-attention-heads",
        "4",
        "--seq-length",
        str(args.seq),
        "--micro-batch-size",
        str(args.micro_batch_size),
        "--global-batch-size",
        str(args.micro_batch_size * dp * args.micro_batches),
        "--pipeline-model-parallel-size",
        str(args.pp),
        "--data-parallel-size",
        str(dp),
        "--gpus-per-node",
        str(args.per_node),
        "--untie-embeddings-and-output-weights",
    ]
    if args.pp > 1 and args.vp > 1:
        options += ["--num-virtual-stages-per-pipeline-rank", str(args.vp)]
    return options


def workload_of(args, folder: Path) -> Workload:
    """The workload of the asked layout."""
    return describe(folder / "workload.json", model_options(args), args.zero_stage, args.whole_parameter_bytes)
