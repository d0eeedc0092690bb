"""The tier for GPUs: every case of ``case_table.py`` within a budget of time, one report file, a table at the end.

    python tests/gpu/run.py [--dry-run] [--resume] [--only TEXT] [--out runs/gpu/report.json]

Ends 0 where every case passed, 1 where one did not or found no time, 2 for bad input.
"""

import argparse
import os
import resource
import shutil
import signal
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(Path(__file__).parent)]

import drive_place
import torch
from case_table import BUDGET_SECONDS, PLANNED, Job, jobs
from drive_place import LEAST_FREE_BYTES
from gpu_report import machine_facts, new_report, resumed, table
from job_runs import Place
from lanes import Lanes
from msgspec.structs import replace

from megatron_ext.formats import json_files
from megatron_ext.formats.errors import InputError
from megatron_ext.runtime import free_host_memory, machine
from megatron_ext.runtime.device import has_cuda

DRY_BUDGET_SECONDS, DRY_LIMITS = 3600.0, 4.0
"""Seconds, and by what limits of cases are multiplied: machines of CI have few processors, and others use them too."""
HANG_SECONDS = 10.0

DRIVES = (Path("/var/tmp"), Path("/tmp"), ROOT)
"""Where to look for a drive, besides next to the report: in a container that may be an overlay without direct reads."""

MOST_LANES, PROCESSORS_OF_LANE = 3, 6
"""Lanes, and the processors for which there is one more."""
LANE_BYTES = 36 << 30
"""Of host memory for each lane: what 1B parameters take there, with copies of their states and what Megatron's own host
optimizer has left page-locked. Where two such jobs do not fit, one comes after the other."""


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--dry-run", action="store_true", help="the same in small on the CPU; no GPU is needed")
    parser.add_argument("--resume", action="store_true", help="keep results that the report has of the same code")
    parser.add_argument(
        "--only", action="append", metavar="TEXT", help="cases whose names contain it (repeatable); report: only.json"
    )
    parser.add_argument("--list", action="store_true", help="print the cases and end")
    parser.add_argument("--out", default=None, metavar="FILE", help="the report; default: runs/gpu/report.json")
    parser.add_argument("--drive", default=None, metavar="DIR", help="directory on the drive; default: one that works")
    parser.add_argument("--budget", type=float, default=None, metavar="SECONDS", help="for all; default: 570")
    parser.add_argument("--spent", type=float, default=0.0, metavar="SECONDS", help="of the budget, before this began")
    parser.add_argument("--hang", default="", metavar="CASE", help="for tests: let this training hang")
    args = parser.parse_args()
    folder, name = "gpu-dry-run" if args.dry_run else "gpu", "only.json" if args.only else "report.json"
    args.out = Path(args.out or ROOT / "runs" / folder / name).resolve()
    args.budget = args.budget or (DRY_BUDGET_SECONDS if args.dry_run else BUDGET_SECONDS)
    return args


def chosen(args: argparse.Namespace) -> list[Job]:
    """All jobs with the cases that are asked for. Raises InputError where there are none."""

    texts = args.only or [""]
    # Without plans what is planned cannot be timed.
    texts = [*texts, *{plans for name, plans in PLANNED.items() if any(text in name for text in texts)}]

    def wanted(job: Job):
        for case in job.cases:
            if any(text in case.name for text in texts):
                limit = case.limit * (DRY_LIMITS if args.dry_run else 1)
                yield replace(case, limit=HANG_SECONDS if case.name == args.hang else limit)

    kept = [replace(job, cases=tuple(wanted(job))) for job in jobs()]
    if not any(job.cases for job in kept):
        raise InputError("no case has such a name; see --list", field="--only", value=" ".join(args.only or []))
    return [job for job in kept if job.cases]


def lanes_of(processors: int, available_bytes: int | None) -> int:
    """How many jobs may run at once; ``available_bytes``: of host memory, None where the system does not say."""
    fitting = MOST_LANES if available_bytes is None else available_bytes // LANE_BYTES
    return max(1, min(MOST_LANES, 1 + processors // PROCESSORS_OF_LANE, fitting))


def device_of_the_tier() -> dict:
    """Name and memory of the device that all cases share, and what NCCL's ranks have to meet in."""
    device, shared = torch.cuda.get_device_properties(0), Path("/dev/shm")
    shared_bytes = shutil.disk_usage(shared).total if shared.is_dir() else 0
    return {"device": device.name, "device_bytes": device.total_memory, "shared_bytes": shared_bytes}


def run(args: argparse.Namespace) -> int:
    todo = chosen(args)
    if args.list:
        print("\n".join(case.name for job in todo for case in job.cases))
        return 0
    if not args.dry_run and not has_cuda():
        raise InputError("torch sees no CUDA device here; --dry-run needs none")
    if args.drive is not None and not os.path.isdir(args.drive):
        raise InputError("is no directory", field="--drive", value=args.drive)
    json_files.check_writable(args.out)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    drive, no_drive = drive_place.find(
        [Path(args.drive)] if args.drive else [args.out.parent, *DRIVES], 0 if args.dry_run else LEAST_FREE_BYTES
    )
    if no_drive:
        print(f"test_gpu: {f'the drive is {drive}: not ' if drive else 'no drive: '}{no_drive}", flush=True)
    facts = machine_facts(machine.environment("cpu" if args.dry_run else "auto"), ROOT, drive)
    cases = [(case.name, job.spare) for job in todo for case in job.cases]
    report = new_report(ROOT, facts, cases, dry_run=args.dry_run, budget=args.budget)
    if args.resume:
        report = resumed(report, args.out)
    processors = len(os.sched_getaffinity(0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a process that is aborted for its stacks leaves no file
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started is ended
    with (
        tempfile.TemporaryDirectory(prefix="work.", dir=args.out.parent) as work,
        tempfile.TemporaryDirectory(prefix="drive.", dir=drive or args.out.parent) as folder,
    ):
        engine = not args.dry_run and find_spec("transformer_engine") is not None
        number = lanes_of(processors, None if args.dry_run else free_host_memory.available_bytes())
        place = Place(
            work=Path(work),
            drive=Path(folder),
            no_drive="" if drive else no_drive,
            dry_run=args.dry_run,
            engine=engine,
            processors=processors,
            lanes=number,
            hang=args.hang,
            **({} if args.dry_run else device_of_the_tier()),
        )
        lanes = Lanes(place, report, args.out, args.spent)
        try:
            report = lanes.run(todo)
        finally:
            lanes.close()
    print(f"{table(report)}\nwrote {args.out}")
    return int(not report.passed)


if __name__ == "__main__":
    try:
        sys.exit(run(parse()))
    except InputError as error:
        print(f"test_gpu: {error}", file=sys.stderr)
        sys.exit(2)
