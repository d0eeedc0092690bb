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
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

BEGUN = time.time()
"""Imports, and what is asked of the machine, are part of the budget."""

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(Path(__file__).parent)]

import device_facts
import drive_place
from case_table import BUDGET_SECONDS, PLANNED, Job, jobs
from device_facts import DeviceFacts
from drive_place import Drive
from gpu_report import machine_facts, new_report, resumed, table
from job_runs import Place
from lanes import Lanes
from msgspec.structs import replace

from megatron_ext.formats import json_files
from megatron_ext.formats.errors import InputError
from megatron_ext.runtime import free_host_memory, host_threads, machine

DRY_BUDGET_SECONDS, DRY_LIMITS = 3600.0, 4.0
"""Seconds, and by what limits of cases are multiplied: machines of CI have few processors, and others use them too."""
HANG_SECONDS = 10.0

DRIVES = (Path("/var/tmp"), Path("/tmp"), ROOT)
"""Where to look for a drive, besides next to the report: in a container that may be an overlay without direct reads."""

MOST_LANES, PROCESSORS_OF_LANE = 3, 6
"""Lanes, and the processors for which there is one more."""


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


def lanes_of(processors: int) -> int:
    """How many jobs may run at once; memory is looked at as they begin."""
    return min(MOST_LANES, 1 + processors // PROCESSORS_OF_LANE)


def look(args: argparse.Namespace) -> tuple[DeviceFacts, str, Drive]:
    """Device, why layers are not Transformer Engine's, and drive. This process asks no device itself: what holds one is
    in the way of the jobs. Raises InputError where there is no device."""
    places = [Path(args.drive)] if args.drive else [args.out.parent, *DRIVES]
    if args.dry_run:
        facts = DeviceFacts(environment=machine.environment("cpu"))
        return facts, "", drive_place.find(places, 0, drive_place.DRY_TRIED_BYTES)
    with ThreadPoolExecutor() as pool:
        asked, why_no_engine = pool.submit(device_facts.ask), pool.submit(device_facts.why_no_engine)
        drive = drive_place.find(places, drive_place.LEAST_FREE_BYTES)
        facts = asked.result()
        if facts.name is None:
            raise InputError("torch sees no CUDA device here; --dry-run needs none")
        return facts, why_no_engine.result(), drive


def place_of(
    args: argparse.Namespace, facts: DeviceFacts, no_engine: str, drive: Drive, work: str, folder: str
) -> Place:
    """What jobs are told of the machine. Their processes are bound as this one is: counted are the processors next to
    the device, as far as a container has them."""
    host_threads.bind(facts.node)
    processors, shared, real = host_threads.processors(), Path("/dev/shm"), not args.dry_run
    return Place(
        work=Path(work),
        drive=Path(folder),
        no_drive="" if drive.directory else drive.said,
        drive_rate=drive.rate if real else None,
        dry_run=args.dry_run,
        engine=real and not no_engine,
        no_engine=no_engine,
        no_flags=facts.no_flags,
        processors=processors,
        lanes=1 if facts.one_process else lanes_of(processors),
        device=facts.name or "",
        device_bytes=facts.free_bytes,
        one_process=facts.one_process,
        host_bytes=free_host_memory.available_bytes() if real else None,
        shared_bytes=(shutil.disk_usage(shared).free if shared.is_dir() else 0) if real else None,
        hang=args.hang,
    )


def run(args: argparse.Namespace) -> int:
    todo = chosen(args)
    if args.list:
        print("\n".join(case.name for job in todo for case in job.cases))
        return 0
    if args.drive is not None and not os.path.isdir(args.drive):
        raise InputError("is no directory", field="--drive", value=args.drive)
    json_files.check_writable(args.out)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    facts, no_engine, drive = look(args)
    found = drive.directory
    if drive.said:
        print(f"test_gpu: {f'the drive is {found}: not ' if found else 'no drive: '}{drive.said}", flush=True)
    if no_engine:
        print(f"test_gpu: layers are Megatron's own, without Transformer Engine: {no_engine}", flush=True)
    of_host = {"transformer_engine_missing": no_engine, "drive_bytes_per_s": round(drive.rate)}
    cases = [(case.name, job.spare) for job in todo for case in job.cases]
    about = machine_facts(facts.environment, ROOT, found, of_host)
    report = new_report(ROOT, about, cases, dry_run=args.dry_run, budget=args.budget)
    if args.resume:
        report = resumed(report, args.out)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a process that is aborted for its stacks leaves no file
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started is ended
    with (
        tempfile.TemporaryDirectory(prefix="work.", dir=args.out.parent) as work,
        tempfile.TemporaryDirectory(prefix="drive.", dir=found or args.out.parent) as folder,
    ):
        place = place_of(args, facts, no_engine, drive, work, folder)
        lanes = Lanes(place, report, args.out, args.spent + time.time() - BEGUN)
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
