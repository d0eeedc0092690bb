"""Program of one rank: trains the cases of a job, one after another.

``train_ranks.py FOLDER``: cases are read from ``FOLDER/job.json``; the first rank appends a line to
``FOLDER/progress.jsonl`` before and after each. A case that raises anything but an InputError ends the process: what
it has left behind on a device is not known.
"""

import ctypes
import math
import sys
import time
import traceback
import zlib
from pathlib import Path

import msgspec
from rank_setup import leave, options_of, start

import trained_model  # isort: skip - Megatron is imported by it
import on_stand_in
import torch
import torch.distributed as dist
from case_table import ITERATIONS, Training
from placed_schedule import placed_schedule
from progress import Progress

from megatron_ext.formats import json_files
from megatron_ext.formats.errors import InputError
from megatron_ext.runtime.device import has_cuda
from megatron_ext.schedule import user_defined_schedule
from megatron_ext.schedule.user_defined_schedule import Schedule


class TrainJob(msgspec.Struct, frozen=True, kw_only=True):
    """What the ranks of one job are asked for.

    Attributes:
        dry_run: sizes for a machine without a GPU.
        drive: directory on the drive.
        engine: layers are Transformer Engine's.
        begin_by: by the system's clock; a case that would not end by then is not begun.
        hang: name of a case that hangs on purpose.
    """

    cases: tuple[Training, ...]
    dry_run: bool
    drive: str
    engine: bool
    begin_by: float
    hang: str = ""

    def options(self, case: Training) -> list[str]:
        """The example's options for a case."""
        return options_of(case, dry_run=self.dry_run, engine=self.engine, drive=self.drive)


class Cases:
    """The cases of a job on this rank.

    References are kept by all that they depend on, and are trained once; a second time where a case differs, to see
    whether this training is the same twice at all.
    """

    def __init__(self, folder: Path, job: TrainJob, everyone):
        self.folder, self.job, self.everyone = folder, job, everyone
        self._references: dict[str, trained_model.Trained] = {}
        self._workloads: dict[tuple, trained_model.Workload] = {}
        self._no_stand_in = on_stand_in.unavailable() if job.dry_run else ""

    def run(self, case: Training) -> dict:
        """Status, one line and figures. Collective."""
        print(*self.job.options(case), flush=True)
        args = trained_model.parse(self.job.options(case))
        figures: dict[str, float] = {}
        difference = ""
        try:
            workload = self._workload(case, args)
            schedule = placed_schedule(case, workload)
            figures = {
                "parameters": sum(p.numel for chunk in workload.chunks for p in chunk.parameters),
                "largest_group_bytes": max(group.bytes for group in schedule.groups),
                "groups": len(schedule.groups),
            }
            difference, figures["train_seconds"] = self._compared(case, args, schedule)
        except InputError as error:
            traceback.print_exc()
            difference = f"refused: {error}"
        if difference:  # said before the device is asked for anything, which ends the process where it has faulted
            print(difference, flush=True)
        if has_cuda():
            figures["device_peak_bytes"] = torch.cuda.max_memory_allocated()
        trained_model.free_caches()
        said = [f"rank {rank}: {text}" for rank, text in enumerate(self._of_all(difference)) if text]
        passed = f"{ITERATIONS} iterations, twice, equal to the last bit"
        passed += f"; {self._no_stand_in}" if self._on_stand_in(case) and self._no_stand_in else ""
        return {"status": "FAIL" if said else "pass", "said": said[0] if said else passed, "figures": figures}

    def _compared(self, case: Training, args, schedule: Schedule) -> tuple[str, float]:
        """What differs, and how long one training took. Collective. Raises InputError."""
        path = str(self.folder / f"schedule.{dist.get_rank()}.json")
        user_defined_schedule.save(path, schedule)
        train = lambda stock: trained_model.train(args, path, stock=stock, overflow="overflow" in case.mode)
        key = _reference_key(case, args, schedule)
        if key not in self._references:
            self._references[key] = train(True)
        reference, found = self._references[key], ""
        if self._on_stand_in(case) and not self._no_stand_in:
            first, found = on_stand_in.on_stand_in(lambda: train(False), seed=zlib.crc32(case.name.encode()))
        else:
            first = train(False)
        runs = [first, train(False)]
        differences = [found, *(differs(reference, run) or says_nothing(case, run) for run in runs)]
        difference = "; ".join(
            f"{name}: {text}" for name, text in zip(("stand-in", "run 1", "run 2"), differences) if text
        )
        if difference:
            for name, one in (("reference", reference), ("run 1", runs[0]), ("run 2", runs[1])):
                wrong = [n for n, value in reference.digests.items() if one.digests.get(n) != value]
                print(f"{name}: losses {one.losses}, norms {one.norms}, parameters that differ: {wrong}", flush=True)
        if any(self._of_all(difference)) and any(self._of_all(differs(reference, train(True)))):
            difference = "the reference differs from itself, so nothing can be compared"
        return difference, round(runs[-1].seconds, 2)

    def _workload(self, case: Training, args) -> trained_model.Workload:
        key = (case.size, case.zero_stage, case.on_host, case.mode)
        if key not in self._workloads:
            self._workloads[key] = trained_model.workload_of(args, case.stage)
        return self._workloads[key]

    def _on_stand_in(self, case: Training) -> bool:
        return self.job.dry_run and on_stand_in.takes(case)

    def _of_all(self, value) -> list:
        values: list = [None] * dist.get_world_size()
        dist.all_gather_object(values, value, group=self.everyone)
        return values

    def may_begin(self, case: Training) -> bool:
        """Whether the time is enough, by the first rank's clock. Collective."""
        return self._of_all(time.time() + case.seconds <= self.job.begin_by)[0]


def _reference_key(case: Training, args, schedule: Schedule) -> str:
    """All that Megatron's own gather at a schedule's bucket layout depends on: not on routes, nor on when or beside
    what the host's optimizer steps."""
    groups = [(g.parameters, g.gradients, g.reduce_every, g.states_rest == "device") for g in schedule.groups]
    return repr((case.size, args.fp16, args.clip_grad, case.mode == "delayed", case.on_host, groups))


def differs(reference: trained_model.Trained, run: trained_model.Trained) -> str:
    """The first difference in one line; empty where there is none."""
    for name in ("losses", "norms"):
        pairs = zip(getattr(reference, name), getattr(run, name), strict=True)
        for iteration, (theirs, ours) in enumerate(pairs, 1):
            if repr(theirs) != repr(ours):  # by which not-a-numbers are equal
                return f"NOT EQUAL: {name} of iteration {iteration}: reference {theirs!r}, this run {ours!r}"
    wrong = [name for name, value in reference.digests.items() if run.digests.get(name) != value]
    return f"NOT EQUAL: {len(wrong)} of {len(reference.digests)} parameters, {wrong[0]} first" if wrong else ""


def says_nothing(case: Training, run: trained_model.Trained) -> str:
    """Why equality of this run proves little; empty where it does not."""
    if not all(math.isfinite(loss) for losses in run.losses for loss in losses):
        return "a loss is not finite, so equality says nothing"
    skipped = sum(norm is None for norm in run.norms)
    if "overflow" in case.mode:
        return "" if 0 < skipped < len(run.norms) else f"{skipped} of {len(run.norms)} steps overflowed: expected some"
    return f"{skipped} steps were skipped: expected none" if skipped else ""


def main() -> int:
    folder = Path(sys.argv[1])
    job = json_files.load(folder / "job.json", TrainJob)
    cases = Cases(folder, job, start(trained_model.parse(job.options(job.cases[0]))))
    progress = Progress(folder, writes=dist.get_rank() == 0)
    for case in job.cases:
        if not cases.may_begin(case):
            break
        progress.begins(case.name)
        if case.name == job.hang:
            ctypes.PyDLL(None).sleep(100_000)  # with the interpreter's lock held, as in a call of a driver
        progress.ends(case.name, **cases.run(case))
    return 0


if __name__ == "__main__":
    leave(main)
