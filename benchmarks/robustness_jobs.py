"""Training jobs that are to be disturbed: small models by drawn schedules of all routes, started in 2 s each, looked at
from outside, and nothing of them may stay; and how runs are compared.

One process imports the example once. A job is a fork of it that launches its ranks as forks, as
``megatron_ext.launch.launcher --fork`` does. All of it runs in a network and a mount namespace of its own, with its
own /dev/shm, so that every port and every file there is a job's. Needs root.
"""

import ctypes
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from cases import LAYOUTS, MODELS, model_options
from draw_schedule import prepared
from emulated_nodes import Nodes
from msgspec.structs import replace

from megatron_ext.formats import json_files
from megatron_ext.formats.errors import InputError
from megatron_ext.launch import launcher
from megatron_ext.workload import workload as workload_file

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = str(ROOT / "examples" / "pretrain_gpt_hybrid.py")
HANGS_AFTER = 90.0
"""Seconds that a job may take to end after a fault, beside a fault's own length; it takes a few."""

ENDS_WITHIN = 15.0
"""Seconds that processes and ports may take to be gone after their launcher."""

ITERATIONS, SAVE_EVERY = 9, 3
SETUPS = {
    "zero 1, interleaved": (1, "interleaved", "fp32", 1),
    "zero 3, interleaved": (3, "interleaved", "fp32", 1),
    "zero 1, no pipeline": (1, "no_pipeline", "bf16-tied", 1),
    "zero 3, no pipeline": (3, "no_pipeline", "fp32", 1),
    "zero 3, 1f1b, optimizer on the host": (3, "1f1b", "bf16-offload", 1),
    "zero 1, two nodes": (1, "no_pipeline", "fp32", 2),
    "zero 3, two nodes": (3, "no_pipeline", "fp32", 2),
    "zero 3, two nodes, pipeline": (3, "1f1b", "fp32", 2),
}
"""Zero stage, layout, model and nodes; four ranks each."""

_CLONE_NEWNS, _CLONE_NEWNET = 0x00020000, 0x40000000


def apart() -> None:
    """Move this process into namespaces of its own: no port, no mount and nothing in /dev/shm is another program's.

    Raises:
        InputError: not root.
    """
    if os.geteuid() != 0:
        raise InputError("namespaces need root: run this as root", field="user", value=os.geteuid())
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNS | _CLONE_NEWNET) != 0:
        raise InputError(f"no namespaces here: {os.strerror(ctypes.get_errno())}", field="kernel")
    for command in ("mount --make-rprivate /", "mount -t tmpfs tmpfs /dev/shm", "ip link set lo up"):
        subprocess.run(command.split(), check=True)


def forked(function: Callable[[], int], log: Path, environment: dict[str, str] | None = None) -> int:
    """Fork; the child leads a session of its own, writes to ``log`` and ends with what ``function`` returns.

    Returns:
        The child's process number.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        launcher.end_with_parent(parent)
        os.setsid()
        out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(out, 1)
        os.dup2(out, 2)
        os.environ.update(environment or {})
        code = function()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


class Job:
    """A launcher and its ranks.

    Args:
        folder: where its files lie: log, metrics, checkpoints, what it puts on the drive, temporary files.
        options: of the example.
        ranks: how many.
        nodes: emulated nodes on which they run, ``ranks`` over all of them; None: this machine.
        environment: variables besides.
        anew: the launcher is a new program, not a fork of this one: variables of the dynamic loader count.
    """

    def __init__(
        self,
        folder: Path,
        options: list[str],
        ranks: int = 4,
        nodes: Nodes | None = None,
        environment: dict[str, str] | None = None,
        anew: bool = False,
    ):
        self.options = options
        self.folder, self.log, self.code, self.hung = folder, folder / "log", None, False
        self.nodes = nodes
        for name in ("tmp", "drive"):
            (folder / name).mkdir(parents=True, exist_ok=True)
        self.log.touch()
        self._read = self.log.stat().st_size
        own = {"TMPDIR": str(folder / "tmp"), "OMP_NUM_THREADS": "1", **(environment or {})}
        per_node = ranks // nodes.count if nodes else ranks
        if nodes:
            own |= nodes.environment(per_node)
        script = str(Path(__file__).with_name("emulated_nodes.py")) if nodes else SCRIPT
        arguments = [SCRIPT, *options] if nodes else options
        self.began = time.monotonic()
        command = [
            sys.executable,
            "-m",
            launcher.__name__,
            "--fork",
            "--nproc-per-node",
            str(ranks),
            script,
            *arguments,
        ]

        def launch() -> int:
            if anew:
                os.execvp(command[0], command)
            return launcher.launch([script, *arguments], ranks, fork=True)

        self.pid = forked(launch, self.log, own)

    def said(self) -> str:
        """What this job has printed."""
        with self.log.open(errors="replace") as file:
            file.seek(self._read)
            return file.read()

    def iteration(self) -> int:
        """The last iteration that was logged; 0 before the first."""
        found = re.findall(r"^iteration +(\d+)/", self.said(), re.MULTILINE)
        return int(found[-1]) if found else 0

    def ranks(self) -> list[int]:
        """Process numbers of the ranks, in order; empty before they are forked or when the launcher has gone."""
        try:  # the first child is the launcher's guard
            return [int(pid) for pid in Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()[1:]]
        except OSError:
            return []

    def seconds(self) -> float:
        """Since it was started."""
        return time.monotonic() - self.began

    def running(self) -> bool:
        if self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.code = os.waitstatus_to_exitcode(status)
        return self.code is None

    def wait(self, seconds: float = HANGS_AFTER) -> bool:
        """Wait for the launcher's end; whether it came. Else everything of the job is killed, and never came."""
        deadline = time.monotonic() + seconds
        while self.running() and time.monotonic() < deadline:
            time.sleep(0.02)
        if self.running():
            self.hung = True
            for pid in self.processes():
                os.kill(pid, signal.SIGKILL)
            while self.running():  # ends: it was killed
                time.sleep(0.02)
        return not self.hung

    def processes(self) -> list[int]:
        """Processes of the job's session that still run."""
        return [pid for pid, session, state in _processes() if session == self.pid and state not in "ZX"]

    def leftovers(self) -> list[str]:
        """What is left of a job that has ended: processes after a while, ports, shared memory, files."""
        deadline = time.monotonic() + ENDS_WITHIN
        # A killed process counts as ended while threads of its own still close its ports.
        while (self.processes() or _ports(self.nodes)) and time.monotonic() < deadline:
            time.sleep(0.02)
        found = [f"process {pid}" for pid in self.processes()]
        found += [f"port {port}" for port in _ports(self.nodes)]
        for pid in self.processes():
            os.kill(pid, signal.SIGKILL)
        found += [f"shared memory {path.name}" for path in Path("/dev/shm").iterdir()]
        return found + [f"file {path.relative_to(self.folder)}" for path in self.left_files()]

    def left_files(self) -> Iterator[Path]:
        """Files that are no result: on the drive, temporary ones, half-written ones."""
        for path in sorted(self.folder.rglob("*")):
            inside = path.relative_to(self.folder).parts
            half_written = path.suffix == ".tmp" or re.fullmatch(r"\..+\.[0-9a-f]{8}", path.name)
            if half_written or (inside[0] in ("tmp", "drive") and len(inside) > 1):
                yield path


def _processes() -> Iterator[tuple[int, int, str]]:
    """(process, session, state) of every process."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            yield int(entry.name), int(fields[3]), fields[0]


def _ports(nodes: Nodes | None) -> list[int]:
    """Ports on which something listens, here and in the nodes."""
    tables = [Path("/proc/self/net/tcp").read_text(), Path("/proc/self/net/tcp6").read_text()]
    for name in nodes.names if nodes else ():
        command = ["ip", "netns", "exec", name, "cat", "/proc/net/tcp"]
        tables.append(subprocess.run(command, capture_output=True, text=True).stdout)
    rows = [line.split() for table in tables for line in table.splitlines()[1:]]
    return [int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == "0A"]


def prepare() -> None:
    """Import the example once, for all jobs; the process must not have started a thread.

    Raises:
        InputError: it cannot be imported here.
    """
    from megatron_ext.cpubench.forked_rank import import_script

    sys.path[:0] = [str(ROOT / ".megatron")]
    if not import_script(SCRIPT):
        raise InputError("cannot be imported without a thread; is there a CUDA device?", file=SCRIPT)
    if subprocess.run(["true"]).returncode:
        raise InputError("no process can be started", field="kernel")


def run_verb(arguments: list[str], log: Path) -> int:
    """``megatron-ext ARGUMENTS`` in a fork; its exit code."""
    from megatron_ext.cli import main as cli

    pid = forked(lambda: cli.main(arguments), log)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


class Case(NamedTuple):
    """A setup with one drawn schedule, and what a run of it without a disturbance gives."""

    setup: str
    schedule: Path
    options: list[str]
    nodes: Nodes | None
    routes: list[str]
    reference: dict
    first_s: float
    """From the launch to the first iteration's end, seconds."""
    iteration_s: float


def drawn(setup: str, seed: int, folder: Path, corpus: Path, nodes: Nodes | None, iterations: int = ITERATIONS) -> Case:
    """A case of ``setup`` in a new ``folder``.

    Raises:
        RuntimeError: the run without a disturbance failed, or differs from Megatron's own gathers.
    """
    zero_stage, layout, model, node_count = SETUPS[setup]
    options = [*MODELS[model], "--vocab-size", "259", *LAYOUTS[layout], "--gpus-per-node", str(4 // node_count)]
    folder.mkdir(parents=True)
    given = ["--out", str(folder / "workload.json"), "--zero-stage", str(zero_stage)]
    model = ["--transformer-impl", "local", *model_options(options)]  # as the example trains it
    if run_verb(["describe", *given, "--", *model], folder / "describe.log"):
        raise RuntimeError((folder / "describe.log").read_text()[-2000:])
    work = workload_file.load(folder / "workload.json")
    on_host = "--optimizer-cpu-offload" in options
    work = replace(work, limits=workload_file.Limits(nvme_slots=2), optimizer=replace(work.optimizer, on_host=on_host))
    schedule = prepared(random.Random(seed), work, folder / "schedule.json")
    used = {unshard.route for rank in schedule.ranks for step in rank.steps for unshard in step.unshard}
    used |= {f"gradients {group.gradients}" for group in schedule.groups if group.gradients}
    used |= {f"states {group.states_rest}" for group in schedule.groups if group.states_rest}
    options += ["--data-path", str(corpus), "--log-interval", "1", "--train-iters", str(iterations)]
    options += ["--user-defined-schedule", str(folder / "schedule.json")]
    case = Case(setup, folder / "schedule.json", options, nodes, sorted(used), {}, 0.0, 0.0)
    first_s = 0.0
    job = start(case, folder / "reference")
    while job.running():
        if job.iteration() and not first_s:
            first_s = job.seconds()
        time.sleep(0.01)
    reference = result(job)
    stock = start(case, folder / "stock", environment={"MEGATRON_EXT_STOCK_GATHER": "1"})
    stock.wait()
    if differences(reference, result(stock)):
        raise RuntimeError(f"{setup}: the schedule does not train like Megatron's own gathers")
    shutil.rmtree(folder / "stock")
    shutil.rmtree(folder / "reference")
    return case._replace(
        reference=reference, first_s=first_s, iteration_s=sum(reference["iteration_us"]) / iterations / 1e6
    )


def start(case: Case, folder: Path, *more: str, environment: dict[str, str] | None = None, anew: bool = False) -> Job:
    """Train a case in ``folder``, from the checkpoint there if there is one, and save one every few iterations."""
    saved = folder / "checkpoints"
    options = [*case.options, "--metrics-path", str(folder / "metrics.json"), "--save", str(saved)]
    options += ["--save-interval", str(SAVE_EVERY), "--user-defined-schedule-nvme-path", str(folder / "drive")]
    options += ["--user-defined-schedule-trace", str(folder / "trace.json")]
    if (saved / "latest_checkpointed_iteration.txt").exists():
        options += ["--load", str(saved)]
    return Job(folder, [*options, *more], nodes=case.nodes, environment=environment, anew=anew)


def result(job: Job) -> dict:
    """The metrics of a job that has ended well; without an iteration where it was resumed behind the last one.

    Raises:
        RuntimeError: it has not.
    """
    if job.running() or job.code:
        raise RuntimeError(f"exit code {job.code}: {job.said()[-3000:]}")
    return json_files.load(job.folder / "metrics.json", dict)


def differences(reference: dict, found: dict) -> list[str]:
    """In what a run, which may have been resumed, differs from one from the start: to the last bit, by name."""
    names = [name for name in ("loss", "grad_norm") if not _ends_with(reference[name], found[name])]
    return names + ["parameters"] * (reference["parameter_sha256"] != found["parameter_sha256"])


def _ends_with(whole, part) -> bool:
    return json.dumps(whole[len(whole) - len(part) :]) == json.dumps(part)


def resumed(case: Case, job: Job) -> dict:
    """What the next start gives in the folder of a job that was disturbed: ``{code, differences, leftovers}``."""
    again = start(case, job.folder)
    hangs = not again.wait()
    if hangs or again.code:
        return {"code": again.code, "hangs": hangs, "said": again.said()[-3000:], "differences": [], "leftovers": []}
    try:
        differs = differences(case.reference, result(again))
    except (InputError, RuntimeError) as failed:
        differs = [str(failed)]
    return {"code": 0, "hangs": False, "differences": differs, "leftovers": again.leftovers()}


def nodes_of(setup: str) -> int:
    return SETUPS[setup][3]
