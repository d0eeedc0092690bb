"""One layout of the processes: its cost table, its plans, and training with it. Part of peers.py.

Every training run, ours or a peer's, is one launch of all ranks with a log of its own.
"""

import os
import subprocess
import sys
from pathlib import Path

from measuring import CORPUS, describe, measure_command

from megatron_ext import planner
from megatron_ext.cost import cost_table as cost
from megatron_ext.formats import json_files
from megatron_ext.report.measured_trace import MeasuredTrace
from megatron_ext.schedule import user_defined_schedule as schedule_file
from megatron_ext.workload import workload as workload_file
from megatron_ext.workload.measured_sizes import largest_rank_bytes

ROOT = Path(__file__).resolve().parents[1]
WORLD = 4
LAYOUTS = {"pp2": (2, 2, ()), "dp4": (1, 1, ()), "dp4-bf16": (1, 1, ("--bf16",))}
"""By layout: pipeline-parallel size, model chunks a rank, further options; the rest of the processes
are replicas. Megatron steps on the host only where the parameters are no float32 of their own."""


class Layout:
    """All that is measured of one layout.

    Args:
        name: a key of LAYOUTS.
        args: the benchmark's options.
        folder: where files of runs go.
    """

    def __init__(self, name: str, args, folder: Path):
        self.name, self.args, self.folder = name, args, folder / name
        self.folder.mkdir()
        self.pp, self.vp, more = LAYOUTS[name]
        self.model = [
            "--num-layers",
            str(args.layers),
            "--hidden-size",
            str(args.hidden),
            "--num-attention-heads",
            str(args.heads),
            "--seq-length",
            str(args.seq),
            "--micro-batch-size",
            str(args.micro_batch_size),
            "--global-batch-size",
            str(args.global_batch_size),
            "--untie-embeddings-and-output-weights",
            "--pipeline-model-parallel-size",
            str(self.pp),
            *more,
        ]
        if self.vp > 1:
            self.model += ["--num-virtual-stages-per-pipeline-rank", str(self.vp)]
        self.plans: dict[str, Path] = {}

    def launch(self, name: str, command: list[str], environment: dict[str, str] | None = None) -> None:
        """Run a script and its options once a rank; raises what ``run`` does."""
        self.run(name, ["megatron_ext.cpubench.launcher", "--nproc-per-node", str(WORLD), *command], environment)

    def run(self, name: str, command: list[str], environment: dict[str, str] | None = None) -> None:
        """Run a module of Python's, with a log.

        Raises:
            RuntimeError: it failed or took too long; the message is one line.
        """
        log = self.folder / f"{name}.log"
        shared = {
            "PYTHONPATH": str(ROOT / ".megatron"),
            "PYTHONWARNINGS": "ignore",
            "OMP_NUM_THREADS": "1",
            "TORCH_CPP_LOG_LEVEL": "ERROR",
        }
        with open(log, "w") as out:
            run = subprocess.Popen(
                [sys.executable, "-m", *command],
                stdout=out,
                stderr=subprocess.STDOUT,
                cwd=ROOT,
                env=os.environ | shared | (environment or {}),
            )
            try:
                code = run.wait(timeout=self.args.timeout)
            except subprocess.TimeoutExpired:
                raise RuntimeError(f"took longer than {self.args.timeout} s") from None
            finally:
                if run.poll() is None:
                    run.terminate()  # a launcher ends its ranks
                    run.wait()
        if code:
            raise RuntimeError(reason(log.read_text(), code))

    def measure(self) -> None:
        """Measure the cost table by which all plans of this layout are made."""
        work = self.describe("zero1", 1, None)
        args = self.args
        self.run(
            "measure",
            measure_command(
                self.folder / "cost_table.json",
                work,
                self.model,
                hidden=args.hidden,
                seq=args.seq,
                micro_batch_size=args.micro_batch_size,
                seconds=args.measure_seconds,
            ),
        )
        self.table = cost.load(self.folder / "cost_table.json")

    def describe(self, name: str, zero_stage: int, whole_parameter_bytes: int | None):
        """The workload; ``whole_parameter_bytes`` limits the whole parameters on one device."""
        model = [*self.model, "--data-parallel-size", str(WORLD // self.pp)]
        return describe(self.folder / f"{name}.workload.json", model, zero_stage, whole_parameter_bytes)

    def whole_parameter_bytes(self, limit: str | None) -> int | None:
        """Bytes of a limit: ``half`` of a rank's parameters, or ``two-layers``: the two largest layers
        and all that is in no layer, which is what FSDP2 needs at least."""
        if limit is None:
            return None
        work = self.work
        if limit == "half":
            return largest_rank_bytes(work) // 2
        needs = []
        for rank in range(work.parallel.pp):
            layers: list[int] = []
            rest = 0
            for chunk in work.chunks_of_rank(rank):
                for number, kind in enumerate(chunk.layer_kinds):
                    size = sum(p.bytes for p in chunk.parameters if p.layer == number)
                    if kind == "transformer":
                        layers.append(size)
                    else:
                        rest += size
            needs.append(rest + sum(sorted(layers)[-2:]))
        return max(needs)

    @property
    def work(self):
        """The workload without limits."""
        return workload_file.load(self.folder / "zero1.workload.json")

    def plan(self, zero_stage: int, limit: str | None, policy: str) -> Path:
        """The schedule for a zero stage and a limit; planned once."""
        name = f"zero{zero_stage}-{limit}-{policy}"
        if name not in self.plans:
            work = self.describe(name, zero_stage, self.whole_parameter_bytes(limit))
            self.plans[name] = self.folder / f"{name}.schedule.json"
            schedule_file.save(self.plans[name], planner.plan(work, self.table, policy=policy, extrapolate=True))
        return self.plans[name]

    def plans_as_json(self) -> dict[str, dict]:
        """Of every plan: what the simulator says of it, and by which route how many bytes come."""
        found = {}
        for name, path in self.plans.items():
            schedule, routes = schedule_file.decode(path), {}
            for rank in schedule.ranks:
                for unshard in (*rank.start.unshard, *(u for step in rank.steps for u in step.unshard)):
                    routes[unshard.route] = routes.get(unshard.route, 0) + schedule.groups[unshard.group].bytes
            found[name] = {
                "predicted_us": schedule.predicted.iteration_time_us,
                "groups": len(schedule.groups),
                "bytes_by_route": routes,
            }
        return found

    def options(self, metrics: Path, iterations: int) -> list[str]:
        """What every training run is given."""
        return [
            *self.model,
            "--data-path",
            CORPUS,
            "--init-by-name",
            "--train-iters",
            str(iterations),
            "--metrics-path",
            str(metrics),
        ]

    def train_ours(self, name: str, zero_stage: int | None, limit: str | None, offload: bool, policy: str) -> dict:
        """Megatron as shipped (``zero_stage`` None) or by a schedule: a peer's kind of metrics."""
        metrics, trace, iterations = self.folder / f"{name}.json", self.folder / f"{name}.trace.json", self.args.iters
        command = [
            "examples/pretrain_gpt_hybrid.py",
            *self.options(metrics, iterations),
            "--user-defined-schedule-trace",
            str(trace),
        ]
        if zero_stage is not None:
            command += ["--user-defined-schedule", str(self.plan(zero_stage, limit, policy))]
        self.launch(name, command + (["--optimizer-cpu-offload"] if offload else []))
        found, measured = json_files.load(metrics, dict), MeasuredTrace(trace, self.work.parallel, iterations)
        lanes = {"optimizer_us": ("optimizer",), "gather_us": ("issue", "wait"), "exposed_us": ("wait",)}
        return (
            found
            | {figure: measured.thread_us(lanes) for figure, lanes in lanes.items()}
            | {"whole_peak_bytes": max(found["peak_bytes"]) if found["peak_bytes"] else largest_rank_bytes(self.work)}
        )

    def train_peer(
        self, name: str, script: str, way: str, environment: dict[str, str] | None = None, iterations: int | None = None
    ) -> dict:
        """A peer's script."""
        metrics = self.folder / f"{name}.json"
        self.launch(
            name, [f"benchmarks/{script}", way, *self.options(metrics, iterations or self.args.iters)], environment
        )
        return json_files.load(metrics, dict)


def reason(log: str, code: int) -> str:
    """The one line of a log that says best why a run failed."""
    for place, name in ((ROOT, "."), (Path.home(), "~")):  # results name no machine's folders
        log = log.replace(str(place), name)
    lines = [line.split("]:", 1)[-1].strip() for line in log.splitlines()]
    errors = [line for line in lines if "Error" in line.split(":")[0] and ":" in line]
    return (errors or [line for line in lines if line] or [f"exit code {code}"])[-1][:200]
