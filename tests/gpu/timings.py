"""Program of one rank: iteration times and device bytes of the rows of ``case_table.TIMINGS``, and rates of links.

``timings.py FOLDER``, asked and told as ``train_ranks.py`` is. Figures are kept and not judged. An iteration lasts from
its first forward to that of the next one, so that nothing is waited for which training does not wait for.
"""

import contextlib
import statistics
import sys
import time
import traceback
from pathlib import Path

import msgspec
from rank_setup import leave, start

import trained_model  # isort: skip - Megatron is imported by it
import deepspeed_training
import fsdp2_training
import model_and_optimizer
import torch
from case_table import LINKS, Program
from copy_rates import copy_rates
from model_flop import iteration_flop
from progress import Progress
from timed_rows import ON_HOST, TIMINGS, Timed, model_options

from megatron_ext.formats import json_files
from megatron_ext.formats.errors import InputError, one_line
from megatron_ext.schedule import validate


class TimeJob(msgspec.Struct, frozen=True, kw_only=True):
    """What is asked for; see ``train_ranks.TrainJob``. ``plans``: directory of the schedules."""

    cases: tuple[Program, ...]
    dry_run: bool
    engine: bool
    drive: str
    plans: str
    begin_by: float


class NoPlan(Exception):
    """Nothing fits, planning failed, what trains is not installed, or a row without a plan does not fit the device."""


class Clock:
    """Times of the iterations of one training, and the most bytes that the device held in those that count."""

    def __init__(self):
        self.begun: list[float] = []
        self.peak_bytes = self.peak_bytes_before = self.host_bytes = 0

    def __call__(self, iteration: int, micro_batch: int) -> None:
        """A forward begins."""
        if micro_batch == 0:
            self.begun.append(time.perf_counter())
            if iteration == 1:
                self.peak_bytes_before = torch.cuda.max_memory_allocated()
                torch.cuda.reset_peak_memory_stats()
            self.peak_bytes, self.host_bytes = torch.cuda.max_memory_allocated(), host_bytes()

    def figures(self) -> dict:
        """In milliseconds and bytes."""
        times = [1e3 * (end - begin) for begin, end in zip(self.begun, self.begun[1:])]
        return {
            "iteration_ms": round(statistics.median(times[1:]), 1),
            "iterations_ms": [round(one, 1) for one in times],
            "device_peak_bytes": self.peak_bytes,
            "device_peak_bytes_of_start": self.peak_bytes_before,
        }


@contextlib.contextmanager
def host_optimizer_of(row: Timed):
    """Megatron's host optimizer as the row has it: the example has no option for its overlap."""
    options = model_and_optimizer.offload_options
    if ON_HOST in row.options:
        more = {"overlap_cpu_optimizer_d2h_h2d": row.overlapped}
        model_and_optimizer.offload_options = lambda: options() | more
    try:
        yield
    finally:
        model_and_optimizer.offload_options = options


def host_bytes() -> int:
    """Resident bytes of this process that are no file: page-locked and shared memory count."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith(("RssAnon:", "RssShmem:")))


def schedule_of(job: TimeJob, number: int) -> tuple[str, list[str]]:
    """The path of a row's schedule, and the options that it needs besides. Raises NoPlan where it is not there."""
    for place, options in (("device", []), ("host", [ON_HOST])):
        path, found = (Path(job.plans) / f"{number}.{name}.json" for name in (f"{place}.schedule", "options"))
        if path.exists() and found.exists():  # of fit
            return str(path), json_files.load(found, list)
        if path.exists():
            return str(path), [] if ON_HOST in TIMINGS[number].options else options
    refused = Path(job.plans) / f"{number}.refused"
    raise NoPlan(refused.read_text() if refused.exists() else "plans were not made: see what planning printed")


def losses_of(row: Timed, args, schedule: str | None, clock: Clock) -> list[list[float]]:
    """Train a row; returns its losses by iteration and micro-batch."""
    if row.system == "fsdp2":
        return fsdp2_training.train(args, clock)
    if row.system == "deepspeed":
        return deepspeed_training.train(args, clock)
    with host_optimizer_of(row):
        return trained_model.train(args, schedule, stock=False, at_micro_batch=clock).losses


def timed(job: TimeJob, name: str) -> dict:
    """Figures of one row. Raises NoPlan where it has no schedule or no room, InputError where a schedule cannot be
    trained by."""
    number = next(number for number, row in enumerate(TIMINGS) if row.name == name)
    row = TIMINGS[number]
    options = model_options(row, dry_run=job.dry_run, engine=job.engine)
    path, predicted, clock = None, None, Clock()
    if row.planned:
        path, more = schedule_of(job, number)
        predicted, options = validate.load(path).predicted, [*options, *more]
    args = trained_model.parse([*options, "--train-iters", str(row.iterations), "--gpus-per-node", "1"])
    trained_model.free_caches()
    before, begun = host_bytes(), time.monotonic()
    try:
        losses = losses_of(row, args, path, clock)
    except torch.cuda.OutOfMemoryError as error:
        if row.planned:  # whose plan is within a limit
            raise
        raise NoPlan(f"the device has no room: {one_line(str(error), 300)}") from None
    except ImportError as error:
        if row.system != "deepspeed":
            raise
        raise NoPlan(f"pip install deepspeed into .venv: {error}") from error
    figures = clock.figures()
    seconds, tokens = figures["iteration_ms"] / 1e3, args.global_batch_size * args.seq_length
    figures |= {
        "losses": [one[0] for one in losses],
        "seconds_in_all": round(time.monotonic() - begun, 1),
        "host_bytes": clock.host_bytes - before,
        "tokens_per_s": round(tokens / seconds),
        "tflop_per_s": round(iteration_flop(args) / seconds / 1e12, 1),
    }
    if predicted is not None:
        figures |= {"predicted_iteration_ms": predicted.iteration_time_us / 1e3}
        figures |= {"predicted_device_bytes": predicted.memory[0].device_total_bytes if predicted.memory else None}
    return figures


def main() -> int:
    folder = Path(sys.argv[1])
    job = json_files.load(folder / "job.json", TimeJob)
    start(trained_model.parse(model_options(TIMINGS[0], dry_run=job.dry_run, engine=job.engine)))
    progress = Progress(folder)
    for case in job.cases:
        if time.time() + case.seconds > job.begin_by:
            break
        progress.begins(case.name)
        try:
            figures = copy_rates(job.dry_run) if case.name == LINKS else timed(job, case.name)
        except NoPlan as error:
            progress.ends(case.name, status="could not try", said=str(error), figures={})
            continue
        except InputError as error:
            traceback.print_exc()
            progress.ends(case.name, status="FAIL", said=str(error), figures={})
            continue
        said = f"{figures['iteration_ms']} ms" if "iteration_ms" in figures else ""
        progress.ends(case.name, status="pass", said=said, figures=figures)
    return 0


if __name__ == "__main__":
    leave(main)
