"""Data-parallel ranks of one model: its cost table, plans within limits of device memory, and training. Part of
peers.py.

Every training run, ours or a peer's, is one launch of all ranks with a log of its own. DeepSpeed lies in a folder of
its own, runs/peers-packages, with .venv's torch: nothing is put into .venv, and no dependency is resolved, so no other
torch can come along.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from emulated_nodes import Nodes
from measuring import CORPUS, describe, measure_command
from msgspec.structs import replace

from megatron_ext import planner
from megatron_ext.cost import cost_table as cost
from megatron_ext.cost.activations import with_activations
from megatron_ext.formats import json_files
from megatron_ext.formats.errors import InputError
from megatron_ext.planner.stock import stock_schedule
from megatron_ext.schedule import user_defined_schedule as schedule_file
from megatron_ext.schedule.memory_bill import memory_bill
from megatron_ext.workload.workload import Limits, Workload

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ROOT / "runs" / "peers-packages"
REQUIREMENTS = Path(__file__).with_name("peer_requirements.txt")
WORLD, PER_NODE = 4, 2
WAYS = ((1, False), (2, False), (2, True), (3, True))
"""Zero stage, and whether the optimizer is on the host: the first that fits is planned."""


class Layout:
    """All that is measured of the model.

    Args:
        args: the benchmark's options.
        folder: where files of runs go.
        nodes: emulated nodes of ``PER_NODE`` ranks, or None: all ranks are on this machine's one node.
    """

    def __init__(self, args, folder: Path, nodes: Nodes | None):
        self.args, self.folder, self.nodes = args, folder, nodes
        sizes = {
            "--num-layers": args.layers,
            "--hidden-size": args.hidden,
            "--num-attention-heads": args.heads,
            "--seq-length": args.seq,
            "--micro-batch-size": args.micro_batch_size,
        }
        self.model = [text for name, value in sizes.items() for text in (name, str(value))]
        self.model += ["--untie-embeddings-and-output-weights", "--bf16"]
        if nodes:
            self.model += ["--gpus-per-node", str(PER_NODE)]
        self._works: dict[int, Workload] = {}

    def options(self, microbatches: int) -> list[str]:
        """Of the model, and of an iteration of so many micro-batches a rank."""
        return [*self.model, "--global-batch-size", str(self.args.micro_batch_size * WORLD * microbatches)]

    def work(self, microbatches: int) -> Workload:
        """The workload without limits."""
        if microbatches not in self._works:
            options = [*self.options(microbatches), "--data-parallel-size", str(WORLD)]
            path = self.folder / f"{microbatches}.workload.json"
            self._works[microbatches] = describe(path, options, 1, None)
        return self._works[microbatches]

    def launch(self, name: str, command: list[str], environment: dict[str, str] | None = None) -> None:
        """Run a script and its options once a rank; raises what ``run`` does."""
        launcher = ["megatron_ext.launch.launcher", "--nproc-per-node", str(WORLD)]
        if self.nodes is None:
            return self.run(name, [*launcher, "--fork", *command], environment)
        enter = ["benchmarks/emulated_nodes.py", sys.executable]
        return self.run(name, [*launcher, *enter, *command], self.nodes.environment(PER_NODE) | (environment or {}))

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
        """Measure the cost table by which all plans are made."""
        args, path = self.args, self.folder / "cost_table.json"
        sizes = {"hidden": args.hidden, "seq": args.seq, "micro_batch_size": args.micro_batch_size}
        command = measure_command(path, self.work(4), self.options(4), seconds=args.measure_seconds, **sizes)
        if self.nodes is None:
            self.run("measure", command)
        else:
            self.launch("measure", ["-m", *command])
        self.table = cost.load(path)

    def stock_bytes(self, microbatches: int) -> tuple[int, int]:
        """What stock Megatron holds on the device without activations, and its activations as they were measured, by
        which plans are made too."""
        work = with_activations(self.work(microbatches), self.table)
        memory = memory_bill(stock_schedule(work), work)[0].memory
        activations = memory.device_bytes.get("activations", 0)
        return memory.device_total_bytes - activations, activations

    def plan(self, microbatches: int, percent: int) -> tuple[Path, bool]:
        """The schedule within ``percent`` of what stock Megatron holds without activations, or 0: within the least that
        fits; and whether the optimizer is on the host.

        Raises:
            InputError: nothing fits.
        """
        held, activations = self.stock_bytes(microbatches)
        limit = held * percent // 100 + activations
        for zero_stage, on_host in WAYS if percent else ():
            try:
                return self._planned(microbatches, limit, zero_stage, on_host), on_host
            except InputError:
                continue
        for more in range(0, 100, 4):
            try:
                return self._planned(microbatches, limit * (100 + more) // 100, 3, True), True
            except InputError as error:
                if found := re.search(r"holds at least (\d+) bytes", str(error)):
                    limit = max(limit, int(found[1])) if more == 0 else limit
        raise InputError("no limit gave a plan", field="limits.device_bytes", value=limit)

    def _planned(self, microbatches: int, limit: int, zero_stage, on_host: bool) -> Path:
        work = self.work(microbatches)
        optimizer = replace(work.optimizer, on_host=on_host)
        work = replace(work, zero_stage=zero_stage, limits=Limits(device_bytes=limit), optimizer=optimizer)
        path = self.folder / f"{microbatches}-{limit}-{zero_stage}.schedule.json"
        schedule_file.save(path, planner.plan(work, self.table, extrapolate=True))
        return path

    def train(
        self,
        name: str,
        command: list[str],
        microbatches: int,
        more: tuple[str, ...] = (),
        environment: dict[str, str] | None = None,
    ) -> dict:
        """Run a script of one system; its metrics.

        Raises:
            RuntimeError: it failed or took too long; the message is one line.
        """
        metrics = self.folder / f"{name}.json"
        options = [*self.options(microbatches), "--data-path", CORPUS, "--init-by-name", *more]
        options += ["--train-iters", str(self.args.iters + 1), "--metrics-path", str(metrics)]
        self.launch(name, [*command, *options], environment)
        return json_files.load(metrics, dict)


def reason(log: str, code: int) -> str:
    """The one line of a log that says best why a run failed."""
    for place, name in ((ROOT, "."), (Path.home(), "~")):  # results name no machine's folders
        log = log.replace(str(place), name)
    lines = [line.split("]:", 1)[-1].strip() for line in log.splitlines()]
    errors = [line for line in lines if "Error" in line.split(":")[0] and ":" in line]
    return (errors or [line for line in lines if line] or [f"exit code {code}"])[-1][:200]


def install_deepspeed() -> Path:
    """The folder for PYTHONPATH, filled if it is not what peer_requirements.txt asks for.

    Raises:
        RuntimeError: pip failed; the end of what it said is in the message.
    """
    stamp = PACKAGES / ".requirements"
    if not stamp.exists() or stamp.read_text() != REQUIREMENTS.read_text():
        shutil.rmtree(PACKAGES, ignore_errors=True)
        options = "--quiet --no-deps --no-build-isolation --disable-pip-version-check".split()
        command = [sys.executable, "-m", "pip", "install", *options, "--target", str(PACKAGES), "-r", str(REQUIREMENTS)]
        done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"DS_BUILD_OPS": "0"}, cwd=ROOT)
        if done.returncode:
            lines = (done.stderr or done.stdout).strip().splitlines() or ["no output"]
            said = next((line for line in lines if "ERROR" in line), lines[-1])
            raise RuntimeError(f"DeepSpeed cannot be installed: {said}")
        stamp.write_text(REQUIREMENTS.read_text())
    return PACKAGES


def deepspeed_environment() -> dict[str, str]:
    """Variables with which a rank finds the packages, and builds what DeepSpeed builds under runs/."""
    return {
        "PYTHONPATH": f"{ROOT / '.megatron'}{os.pathsep}{install_deepspeed()}",
        "TORCH_EXTENSIONS_DIR": str(ROOT / "runs" / "peers-extensions"),
    }
