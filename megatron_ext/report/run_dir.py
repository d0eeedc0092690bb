"""The files of one main job, read together and checked against each other."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from megatron_ext.cost import cost_table as cost
from megatron_ext.formats import json_files
from megatron_ext.formats import metrics as metrics_file
from megatron_ext.formats.checks import Checker
from megatron_ext.formats.errors import InputError
from megatron_ext.formats.metrics import Metrics
from megatron_ext.report.measured_trace import MeasuredTrace
from megatron_ext.report.turn_ratio import counted
from megatron_ext.schedule import match, schedules, validate
from megatron_ext.schedule.user_defined_schedule import Schedule
from megatron_ext.workload import workload as workload_file
from megatron_ext.workload.workload import Workload

READ = {
    "cost_table": "cost_table.json",
    "workload": "workload.json",
    "schedule": "schedule.json",
    "stock_trace": "stock.trace.json",
    "scheduled_trace": "scheduled.trace.json",
    "stock_metrics": "stock.metrics.json",
    "scheduled_metrics": "scheduled.metrics.json",
    "reference_metrics": "reference.metrics.json",
}
"""The files of a run directory. Metrics and the trace of stock training may be missing."""

COMPARED = ("scheduled_metrics", "stock_metrics", "stock_trace")
"""Files that a comparison with stock training needs in addition to the trace of the scheduled training."""

GATHERS_ONLY = "gathers_only.schedule.json"
"""At zero stage 3, the file with the schedule by which the run of ``stock_trace`` trained."""

WRITTEN = {"report": "report.md", "timeline": "timeline.png"}
"""The files that ``report`` adds."""


@dataclass(frozen=True)
class RunDir:
    """The files of ``prepare``, the trace of a training by them, and what else there is. Scripts other than the example
    write no metrics, and a model that does not fit without a schedule has no stock run.

    ``stock`` is the run that the schedule is compared with. It trained by ``gathers_only`` or, if that is None, as
    stock Megatron does, at zero stage 1. ``stock`` and ``stock_trace`` are None if a file of ``COMPARED`` is missing.
    """

    path: Path
    table: cost.CostTable
    workload: Workload
    schedule: Schedule
    scheduled_trace: MeasuredTrace
    gathers_only: Schedule | None = None
    scheduled: Metrics | None = None
    reference: Metrics | None = None
    stock: Metrics | None = None
    stock_trace: MeasuredTrace | None = None

    @property
    def on_device(self) -> bool:
        """Whether ranks compute on devices, so that the training thread issues in the meantime. A table may be of
        another machine, or of a data sheet; it counts if the trace does not say it."""
        of_run = self.scheduled_trace.about.on_device
        return (self.table.metadata.software or {}).get("backend") == "nccl" if of_run is None else of_run

    @property
    def iterations(self) -> int:
        """The number of iterations that the scheduled run trained."""
        return self.scheduled_trace.iterations

    @property
    def iteration_us(self) -> Sequence[float]:
        """The time of each iteration of the scheduled run, from its metrics; without them, from the start of the first
        step to the end of the optimizer step."""
        if self.scheduled is not None:
            return self.scheduled.iteration_us
        return [*map(self.scheduled_trace.iteration_us, range(1, self.iterations + 1))]

    @property
    def turn_iterations(self) -> int | None:
        """The number of iterations in a turn, if stock and scheduled training took turns."""
        turns = {run and run.turn_iterations for run in (self.stock, self.scheduled)}
        return turns.pop() if len(turns) == 1 else None

    @property
    def counted(self) -> list[int]:
        """The indices of the iterations that figures are of. If the run took turns, that holds without the files of the
        other run too. Empty if all iterations are unlike the schedule's."""
        own = counted(self.iterations, self.scheduled and self.scheduled.turn_iterations)
        return [index for index in own if index + 1 not in self.scheduled_trace.unlike]

    @property
    def stock_name(self) -> str:
        """The name in a report of the run that the schedule is compared with."""
        if self.gathers_only is not None:
            return "all-gathers alone"
        return "stock" if self.workload.zero_stage < 3 else "zero stage 1"

    def file(self, name: str) -> Path:
        """Path of a file by its key in ``READ`` or ``WRITTEN``."""
        return self.path / {**READ, **WRITTEN}[name]


def load(directory) -> RunDir:
    """Read a run directory.

    Raises:
        InputError: a file is missing or damaged, or two files are not from the same run. Traces of earlier versions do
            not say by which schedule they were recorded.
    """
    path = Path(directory)
    if not os.path.isdir(path):  # a name may be too long
        raise InputError("not a directory", file=path)
    at = {key: path / name for key, name in READ.items()}
    if not at["scheduled_trace"].exists():
        said = f"holds no measured run: train with --user-defined-schedule-trace {at['scheduled_trace']}"
        raise InputError(said, file=path)
    table = cost.load(at["cost_table"])
    workload = workload_file.load(at["workload"])
    if workload.ramp and not at["schedule"].exists():  # figures are of the largest number of micro-batches
        at["schedule"] = path / "schedules"
    schedule = validate.load(at["schedule"])
    match.match(schedule, workload, file=at["schedule"])
    planned_by = schedule.metadata.cost_table_sha256
    if planned_by is not None and planned_by != json_files.sha256(at["cost_table"]):
        said = "planned with another cost table than the one in this directory"
        Checker(at["schedule"]).refuse(said, "metadata.cost_table_sha256", planned_by[:12])
    gathers_only = _gathers_only(path / GATHERS_ONLY, workload)
    there = {key for key, file in at.items() if file.exists()}

    def metrics(key: str, scheduled: Metrics | None = None) -> Metrics | None:
        return _metrics(at[key], workload, scheduled) if {key, "scheduled_metrics"} <= there else None

    def traced(key: str, by: Path | None) -> MeasuredTrace:
        trace = MeasuredTrace(at[key], workload.parallel, scheduled and scheduled.iterations, workload.ramp)
        about = trace.about
        if by is not None and (about.scheduled is False or about.schedule_sha256 not in (None, schedules.sha256(by))):
            said = f"is not of a training by this {by.name}: by another, by none, or the reference of an equality check"
            raise InputError(said, file=at[key])
        return trace

    scheduled = metrics("scheduled_metrics")
    reference, trace = metrics("reference_metrics", scheduled), traced("scheduled_trace", at["schedule"])
    found = RunDir(path, table, workload, schedule, trace, gathers_only, scheduled, reference)
    if not found.counted:
        raise InputError("all iterations are of a smaller batch, or skipped their update", file=at["scheduled_trace"])
    if not there.issuperset(COMPARED):
        return found
    trace = traced("stock_trace", path / GATHERS_ONLY if gathers_only is not None else None)
    return replace(found, stock=metrics("stock_metrics", scheduled), stock_trace=trace)


def _gathers_only(path: Path, workload: Workload) -> Schedule | None:
    if workload.zero_stage < 3 or not path.exists():
        return None
    schedule = validate.load(path)
    match.match(schedule, workload, file=path)
    others = sorted(schedule.routes - {"gpu"})
    if others:
        raise InputError("expected all-gathers alone", file=path, field="route", value=others[0])
    return schedule


def _metrics(path: Path, workload: Workload, scheduled: Metrics | None) -> Metrics:
    metrics, world = metrics_file.load(path), workload.parallel.world_size
    if scheduled is not None and metrics.iterations != scheduled.iterations:
        said = f"has {metrics.iterations} iterations, the scheduled run {scheduled.iterations}"
        Checker(path).refuse(said, "loss")
    if len(metrics.parameter_sha256) != world:
        Checker(path).refuse(f"has {len(metrics.parameter_sha256)} entries for {world} ranks", "parameter_sha256")
    return metrics
