"""Plans what ``timings.py`` trains, as a user does without a GPU: describe, estimate from a data sheet, plan.

``timed_plans.py FOLDER [--dry-run] [--engine] [--spare]`` writes ``FOLDER/NUMBER.host.schedule.json`` or
``NUMBER.device.schedule.json``, by where the optimizer steps, for our rows of ``timed_rows.TIMINGS``; or
``NUMBER.refused`` with the reason. ``--spare``: for the rows that need not be timed, else for the others. Where an
optimizer on the device fits as well, the faster plan is taken. Rows of ``fit`` also get ``NUMBER.options.json``: the
settings that it found, as options of the example. Ends 1 where a row was refused for another reason than memory.
"""

import argparse
import contextlib
import io
import json
import os
import re
import shlex
import sys
import traceback
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from gpu_report import OF_MEMORY
from msgspec.structs import replace
from timed_rows import LEAST, ON_HOST, TIMINGS, Timed, model_options

from megatron_ext import planner
from megatron_ext.cli import main
from megatron_ext.cost import cost_table as cost
from megatron_ext.formats.errors import InputError
from megatron_ext.planner.stock import stock_schedule
from megatron_ext.runtime import host_threads
from megatron_ext.schedule import user_defined_schedule as schedule_file
from megatron_ext.schedule.memory_bill import memory_bill
from megatron_ext.workload import workload as workload_file
from megatron_ext.workload.workload import Limits, Workload

HARDWARE = "h200-one-gpu"
"""The data sheet: of the machine on which the figures were made that these are held against."""

LEFT_PROCESSORS = 2

BAD_INPUT = 2
"""The exit code of ``megatron-ext``."""


def call(*words: object) -> None:
    """``megatron-ext`` in this process: another would import everything anew. Raises InputError for bad input alone."""
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        code = main.main(list(map(str, words)))
    print(said.getvalue(), end="", file=sys.stderr)
    if code:
        last = (said.getvalue().splitlines() or [""])[-1]
        raise (InputError if code == BAD_INPUT else RuntimeError)(f"megatron-ext {words[0]}: exit code {code}: {last}")


def describe(folder: Path, row: Timed, *, dry_run: bool, engine: bool) -> Workload:
    """The workload of a row's model, whose optimizer is where its options say."""
    path = folder / f"{row.size}.{row.micro_batches}.{ON_HOST in row.options}.workload.json"
    if not path.exists():
        own = folder / f"{os.getpid()}.workload.json"
        call("describe", "--out", own, *model_options(row, dry_run=dry_run, engine=engine), "--zero-stage", "3")
        own.replace(path)
    return workload_file.load(path)


def stock_bytes(work: Workload) -> int:
    """What stock Megatron holds on the device with everything there, activations included."""
    assert work.optimizer is not None
    everything = replace(work, zero_stage=1, optimizer=replace(work.optimizer, on_host=False))
    return memory_bill(stock_schedule(everything), everything)[0].memory.device_total_bytes


def _table(folder: Path, name: str, work: Workload, options: list[str]) -> cost.CostTable:
    """The estimate for a workload."""
    workload, table = folder / f"{name}.workload.json", folder / f"{name}.table.json"
    workload_file.save(workload, work)
    sizes = [options[options.index(one) + at] for one in ("--seq-length", "--micro-batch-size") for at in (0, 1)]
    call("cost", "estimate", "--hardware", HARDWARE, "--workload", workload, "--out", table, *sizes)
    return cost.load(table)


def _planned(work: Workload, table: cost.CostTable, limit: int | None):
    """The plan within ``limit``, or within the least that fits for 0. Raises InputError where nothing does."""
    within = lambda size: planner.plan(replace(work, limits=Limits(device_bytes=size)), table)
    if limit != LEAST:
        return within(limit)
    try:
        return within(1)
    except InputError as error:
        found = re.search(r"holds at least (\d+) bytes", str(error))
        if found is None:
            raise
        return within(int(found[1]))


SETTINGS = ("micro-batch-size", "recompute-granularity", "recompute-method", "recompute-num-layers")
"""That ``fit`` may find, and the example takes, but for where the optimizer steps."""


def settings_of(launch: str) -> list[str]:
    """Of the options that ``fit`` says are to be put into a launch script, those that the example takes."""
    words = shlex.split(launch)
    named = [word for name in SETTINGS if f"--{name}" in words for word in words[words.index(f"--{name}") :][:2]]
    return [*named, *([ON_HOST] if ON_HOST in words else [])]


def fit(folder: Path, number: int, limit: int | None, options: list[str]) -> None:
    """Write what ``fit`` finds within ``limit``, and the schedule that its commands make."""
    asked = [] if limit is None else ["--limit-device-bytes", limit]
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        call("fit", "--json", "--hardware", HARDWARE, *asked, "--", *options)
    found = json.loads(said.getvalue())
    settings = settings_of(found["launch"]["add"])
    own = folder / f"{number}.fit"
    own.mkdir()
    before = os.getcwd()
    os.chdir(own)  # the commands name files beside them
    try:
        for command in found["commands"]:
            call(*shlex.split(command)[1:])
    finally:
        os.chdir(before)
    (folder / f"{number}.options.json").write_text(json.dumps(settings))
    (own / "schedule.json").rename(folder / f"{number}.{'host' if ON_HOST in settings else 'device'}.schedule.json")


def plan(folder: Path, number: int, *, dry_run: bool, engine: bool) -> None:
    """Write the schedule of a row."""
    row = TIMINGS[number]
    options, work = (
        model_options(row, dry_run=dry_run, engine=engine),
        describe(folder, row, dry_run=dry_run, engine=engine),
    )
    assert work.optimizer is not None
    if row.percent is None:
        limit, places = None if dry_run else row.limit_device_bytes, (work.optimizer.on_host,)
    else:
        limit, places = stock_bytes(work) * row.percent // 100, (False, True)
    if row.system == "fit":
        fit(folder, number, limit, options)
        return
    plans, refused = [], None
    for on_host in places:
        own = replace(work, optimizer=replace(work.optimizer, on_host=on_host))
        try:
            made = _planned(own, _table(folder, f"{number}.{on_host}", own, options), limit)
        except InputError as error:
            refused = error
            continue
        plans.append((limit == LEAST and on_host is False, made.predicted.iteration_time_us, on_host, made))
    if not plans:
        raise refused or AssertionError(row)
    _, _, on_host, made = min(plans, key=lambda one: one[:3])
    schedule_file.save(folder / f"{number}.{'host' if on_host else 'device'}.schedule.json", made)


def try_plan(folder: Path, number: int, dry_run: bool, engine: bool) -> bool:
    """Whether a row has a plan, or has none for lack of memory."""
    try:
        plan(folder, number, dry_run=dry_run, engine=engine)
    except Exception as error:  # of one row: the others can be timed
        traceback.print_exc()
        (folder / f"{number}.refused").write_text(f"{error}")
        return isinstance(error, InputError) and any(words in str(error) for words in OF_MEMORY)
    return True


def plan_all() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    for name in ("--dry-run", "--engine", "--spare"):
        parser.add_argument(name, action="store_true")
    args = parser.parse_args()
    numbers = [number for number, row in enumerate(TIMINGS) if row.planned and row.spare is args.spare]
    processes = max(1, host_threads.processors() - LEFT_PROCESSORS)
    with ProcessPoolExecutor(min(processes, len(numbers))) as pool:
        jobs = [pool.submit(try_plan, args.folder, number, args.dry_run, args.engine) for number in numbers]
    return 0 if all(job.result() for job in jobs) else 1


if __name__ == "__main__":
    sys.exit(plan_all())
