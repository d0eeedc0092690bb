"""A job that runs: its command, its cases as they begin and end, and what is said of one that does not end."""

import json
import os
import shlex
import sys
import time
from pathlib import Path
from typing import NamedTuple

import msgspec
from case_table import HOST_OPTIMIZER, LAYOUTS, PLANS, SPARE_PLANS, Job, Program, Training
from gpu_report import GIVEN_UP, Result, Status
from job_process import END_SECONDS, JobProcess
from msgspec.structs import replace

from megatron_ext.formats import json_files
from megatron_ext.launch.launcher import LOOPBACK
from megatron_ext.measure.options import STEPS
from megatron_ext.megatron.device_environment import REPEATABLE, SCHEDULED

HERE = Path(__file__).parent
ROOT = HERE.parents[1]

START_SECONDS = 300.0
"""Until the first case begins: from a network's file system Transformer Engine alone may be read for minutes."""

LAST_LINES = 3
"""Of what a job printed that has died: the error, and which rank the launcher names."""

OUTPUT_CHARACTERS = 12_000
"""That are kept of it: the stacks of a rank that a signal has ended are among them."""

QUIET_NETWORK = {"NCCL_DEBUG": "WARN"}
"""NCCL says why it fails; the user's own setting goes before."""

NO_SPIN = {"OMP_WAIT_POLICY": "passive"}

LEFT_PROCESSORS = 2
"""Of the machine, for what is not the optimizer's threads."""


class Place(NamedTuple):
    """Where jobs run.

    Attributes:
        work: a directory that is removed at the end.
        drive: a directory on the drive; so is this.
        no_drive: why that is no drive that can be used; empty where it is one.
        drive_rate: bytes per second that it writes and reads; None where nobody has looked.
        engine: layers and the host's optimizer are Transformer Engine's.
        no_engine: why they are not.
        no_flags: why streams of the device cannot wait for flags in host memory; empty where they can.
        processors: that this machine lets us use.
        lanes: jobs that may run at once.
        device, device_bytes: name of the device, and its memory that is free; None where there is none.
        one_process: the device takes one process at a time.
        host_bytes, shared_bytes: of host memory and of /dev/shm that are free; None where nobody has looked.
        hang: name of a training that hangs on purpose.
    """

    work: Path
    drive: Path
    no_drive: str
    dry_run: bool
    engine: bool
    processors: int
    lanes: int
    hang: str
    drive_rate: float | None = None
    no_engine: str = ""
    no_flags: str = ""
    device: str = ""
    device_bytes: int | None = None
    one_process: bool = False
    host_bytes: int | None = None
    shared_bytes: int | None = None

    def environment(self, ranks: int, *, alone: bool) -> dict[str, str]:
        """Of the processes of a job with so many ranks. What is timed, ``alone``, need not be the same twice. Threads
        of jobs that run at once do not spin while they wait: the host's step takes all processors in each."""
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
        path = [str(ROOT), str(ROOT / ".megatron"), os.environ.get("PYTHONPATH", "")]
        shares = ranks * (1 if alone else self.lanes)
        threads = 1 if self.dry_run else max(1, (self.processors - LEFT_PROCESSORS) // shares)
        own = {
            "CUDA_VISIBLE_DEVICES": "" if self.dry_run else visible,
            "OMP_NUM_THREADS": str(threads),
            "PYTHONPATH": os.pathsep.join(filter(None, path)),
            "PYTHONWARNINGS": "ignore",
        }
        return {
            **QUIET_NETWORK,
            **os.environ,
            **SCHEDULED,
            **({} if alone else {**REPEATABLE, **NO_SPIN}),
            **LOOPBACK,
            **own,
        }


class JobRun:
    """One job's processes, until all its cases have ended or one brings them down.

    Args:
        begin_by, end: by the system's clock: after the first no case begins, at the second all time is over.

    Attributes:
        left: cases without a result.
        over: no process is left.
        interrupted: a case has brought the processes down; what is left can go on in new ones.
    """

    def __init__(self, job: Job, place: Place, folder: Path, begin_by: float, end: float):
        self.job, self.folder, self.left, self._end = job, folder, list(job.cases), end
        self.over = self.interrupted = False
        folder.mkdir()
        self._progress = folder / "progress.jsonl"
        self._read = 0
        self._current: Training | Program | None = None if job.layout else job.cases[0]
        self._since = time.time()
        command, ranks = _command(job, place, folder, begin_by)
        environment = place.environment(ranks, alone=job.alone)
        new = [f"{name}={value}" for name, value in environment.items() if os.environ.get(name) != value]
        self._started_by = shlex.join(["env", *new, *command])
        self._process = JobProcess(command, environment, ROOT, folder / "log")

    def poll(self) -> list[Result]:
        """Results that are new."""
        code = self._process.poll()  # before reading: what an ended process has written is all there
        results = self._new_results()
        if code is not None:
            results += self._ended(code)
        elif time.time() - self._since > self._limit():
            results += self._brought_down("HUNG", f"no end after {time.time() - self._since:.0f} s")
        return results

    def _limit(self) -> float:
        """Seconds for what it does now: a case, the way to the next one, or ending."""
        return self._current.limit if self._current else START_SECONDS if self.left else END_SECONDS

    def stop(self) -> list[Result]:
        """End it for lack of time."""
        said = "its time was over before it ended"
        results = [self._result("NOT RUN", said)] if self._current is not None else []
        self._process.kill()
        self.over = True
        return results

    def _new_results(self) -> list[Result]:
        if not self._progress.exists():
            return []
        text, results = self._progress.read_text(), []
        end = text.rfind("\n") + 1
        for line in text[self._read : end].splitlines():
            event = json.loads(line)
            if "begun" in event:
                self._current, self._since = next(c for c in self.left if c.name == event["begun"]), event["at"]
            else:
                output = "" if event["status"] == "pass" else self._process.said()
                results.append(self._result(event["status"], event["said"], figures=event["figures"], output=output))
                self._since = time.time()
        self._read = end
        return results

    def _ended(self, code: int) -> list[Result]:
        self._process.kill()  # what a rank may have left running
        self.over = True
        if self.job.layout is None:
            figures = self._reports()
            if code == 0:
                notes = figures.get("cost_table", {}).get("metadata", {}).get("notes", [])
                said = "; ".join(note for note in notes if note.startswith(GIVEN_UP))
                return [self._result("pass", said, figures=figures)]
            return [self._result("FAIL", self._why(figures), figures=figures, output=self._process.said())]
        if code == 0:
            return []
        lines = [line for line in self._process.said().splitlines() if not line.startswith(" ")]
        return self._brought_down("DIED", f"ended with exit code {code}: {' / '.join(lines[-LAST_LINES:])}")

    def _why(self, figures: dict) -> str:
        findings = figures.get("doctor", {}).get("findings", [])
        failed = [f"{one['check']}: {one['found']}" for one in findings if one["status"] == "fail"]
        lines = [line for line in self._process.said().splitlines() if line.strip()]
        return "; ".join(failed) or (lines[-1] if lines else "")

    def _brought_down(self, status: Status, said: str) -> list[Result]:
        """The case that runs gets no other result, or the first one, which did not begin. The others have not been
        tried: in new processes they may."""
        output = self._process.said(OUTPUT_CHARACTERS)
        stacks = self._process.stacks(self._end - time.time()) if status == "HUNG" else ""
        self._process.kill()
        self.over, self.interrupted = True, self._current is not None
        if not self.left:
            return []
        if self._current is None:
            self._current, said = self.left[0], f"before it began: {said}"
        figures = self._reports() if self.job.layout is None else {}
        return [self._result(status, said, stacks=stacks, output=output, figures=figures)]

    def _reports(self) -> dict:
        """What the program has written so far."""
        return {path.name.partition(".")[0]: _json(path) for path in self.folder.glob("*.report.json")}

    def _command_of(self, case: str) -> str:
        return f"bash scripts/test_gpu.sh --only {shlex.quote(case)} # {self._started_by}"

    def _result(self, status: Status, said: str = "", **more) -> Result:
        case, self._current = self._current, None
        assert case is not None
        self.left.remove(case)
        seconds, command = round(time.time() - self._since, 1), self._command_of(case.name)
        return Result(case=case.name, status=status, said=said, seconds=seconds, command=command, **more)


def _json(path: Path):
    return msgspec.json.decode(path.read_bytes())


def _command(job: Job, place: Place, folder: Path, begin_by: float) -> tuple[list[str], int]:
    """What runs a job, and how many ranks it has."""
    if job.layout is None:
        return _program(job.cases[0], place, folder), 1
    ranks = LAYOUTS[job.layout][0]
    asked = dict(cases=job.cases, dry_run=place.dry_run, drive=str(place.drive))
    asked |= dict(plans=str(place.work), engine=place.engine, begin_by=begin_by, hang=place.hang)
    json_files.save(folder / "job.json", asked, indent=1)
    launcher = [sys.executable, "-m", "megatron_ext.launch.launcher", *(["--fork"] if place.dry_run else [])]
    return [*launcher, "--nproc-per-node", str(ranks), str(HERE / job.script), str(folder)], ranks


def _program(case: Training | Program, place: Place, folder: Path) -> list[str]:
    name, ranks = case.name, case.ranks
    device = "cpu" if place.dry_run else "cuda"
    python, ours = [sys.executable], [sys.executable, "-m", "megatron_ext"]
    if name.startswith("doctor"):
        out = ["--out", str(folder / "doctor.report.json"), "--device", device]
        out += [] if place.no_drive else ["--nvme", str(place.drive)]
        out += ["--nproc", "2"] if ranks > 1 else []
        return [*ours, "doctor", *out, *(["--check-seconds", "600", "--seconds", "900"] if place.dry_run else [])]
    if name.startswith("measure"):
        links = "cpu,publish,optimizer,compute,contention" + (",gpu,cpu_shard,reduce" if ranks > 1 else "")
        on_host = name.endswith(HOST_OPTIMIZER)
        links += f",host_memory,{','.join(STEPS)}" if on_host else ""
        if place.dry_run:  # without the drive: one that others use too stalls, and few seconds give few samples
            how = "--seconds 6".split()
        else:
            links += "" if place.no_drive else ",nvme"
            how = f"--seconds 20 --threads {max(1, (place.processors - LEFT_PROCESSORS) // ranks)}".split()
            how += ["--hidden-size", "4096", "--seq-length", "2048"]
            how += [] if place.no_drive else ["--nvme-path", str(place.drive)]
        how += ["--optimizer-on-host"] if on_host else []
        out = ["--out", str(folder / "cost_table.report.json"), "--device", device, "--dp", str(ranks)]
        return [*ours, "measure", *out, "--links", links, *how]
    if name.startswith("CPU suite"):
        tests = ["tests/unit/formats"] if place.dry_run else ["tests/unit", "tests/distributed", "tests/end_to_end"]
        workers = ["-n", str(place.processors + 1), "--dist", "loadfile"]
        hidden = ["env", "CUDA_VISIBLE_DEVICES=", "OMP_NUM_THREADS=1"]
        return [*hidden, *python, "-m", "pytest", *workers, "-p", "no:cacheprovider", *tests]
    how = [*(["--dry-run"] if place.dry_run else []), *(["--engine"] if place.engine else [])]
    if name in (PLANS, SPARE_PLANS):
        how += ["--spare"] if name == SPARE_PLANS else []
        return ["env", "CUDA_VISIBLE_DEVICES=", *python, str(HERE / "timed_plans.py"), str(place.work), *how]
    return [*python, str(HERE / "kill_and_resume.py"), str(folder), str(place.drive), *how]


def with_cases(job: Job, cases) -> Job:
    """The job with those of its cases alone."""
    return replace(job, cases=tuple(cases))
