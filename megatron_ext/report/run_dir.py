"""The files of one main job, read together and checked against each other."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_ext.cost import cost_table as cost
from megatron_ext.formats import json_files
from megatron_ext.formats import metrics as metrics_file
from megatron_ext.formats.checks import Checker
from megatron_ext.formats.errors import InputError
from megatron_ext.formats.metrics import Metrics
from megatron_ext.report.measured_trace import MeasuredTrace
from megatron_ext.schedule import match, validate
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
"""The files of a run directory. Only the reference may be missing."""

COMPARED = ("scheduled_metrics", "stock_metrics", "stock_trace")
"""Files that a comparison needs in addition to the trace of the scheduled training. To correct a cost table, that trace
is enough."""

GATHERS_ONLY = "gathers_only.schedule.json"
"""At zero stage 3, the file with the schedule by which the run of ``stock_trace`` trained."""

WRITTEN = {"report": "report.md", "timeline": "timeline.png"}
"""The files that ``report`` adds."""


@dataclass(frozen=True)
class TracedRun:
    """The files of ``prepare``, and the trace of a training by them. Nothing else of the training is read: scripts
    other than the example write no metrics, and a model that does not fit without a schedule has no stock run."""

    path: Path
    table: cost.CostTable
    workload: Workload
    schedule: Schedule
    scheduled_trace: MeasuredTrace

    @property
    def on_device(self) -> bool:
        """Whether ranks compute on devices, so that the training thread issues in the meantime."""
        return (self.table.metadata.software or {}).get("backend") == "nccl"

    @property
    def iterations(self) -> int:
        """The number of iterations that the scheduled run trained."""
        return self.scheduled_trace.iterations

    @property
    def iteration_us(self) -> Sequence[float]:
        """The time of each iteration, from the start of its first step to the end of the optimizer step."""
        windows = map(self.scheduled_trace.window, range(1, self.iterations + 1))
        return [w.end_us - min(each.start_us for each in w.events if each.lane == "compute") for w in windows]

    @property
    def turn_iterations(self) -> int | None:
        """The number of iterations in a turn, if stock and scheduled training took turns."""
        return None


@dataclass(frozen=True)
class RunDir(TracedRun):
    """All inputs of a report. ``reference`` is None if no reference was trained.

    ``stock`` is the run that the schedule is compared with. It trained by ``gathers_only`` or, if that is None, as
    stock Megatron does, at zero stage 1.
    """

    stock: Metrics
    scheduled: Metrics
    reference: Metrics | None
    stock_trace: MeasuredTrace
    gathers_only: Schedule | None

    @property
    def stock_name(self) -> str:
        """The name in a report of the run that the schedule is compared with."""
        if self.gathers_only is not None:
            return "all-gathers alone"
        return "stock" if self.workload.zero_stage < 3 else "zero stage 1"

    @property
    def iteration_us(self) -> Sequence[float]:
        """The time of each iteration of the scheduled run, from its metrics."""
        return self.scheduled.iteration_us

    @property
    def turn_iterations(self) -> int | None:
        return self.scheduled.turn_iterations if self.stock.turn_iterations == self.scheduled.turn_iterations else None

    def file(self, name: str) -> Path:
        """Path of a file by its key in ``READ`` or ``WRITTEN``."""
        return self.path / {**READ, **WRITTEN}[name]


def load_measured(directory) -> TracedRun:
    """Read a run directory. If the stock run's files or metrics are missing, read only the plan and the trace of the
    scheduled training.

    Raises:
        InputError: as :func:`load`.
    """
    path = Path(directory)
    trace, lacks = path / READ["scheduled_trace"], [key for key in COMPARED if not os.path.exists(path / READ[key])]
    if os.path.isdir(path) and "scheduled_metrics" in lacks and not os.path.exists(trace):  # a name may be too long
        raise InputError(f"holds no measured run: train with --user-defined-schedule-trace {trace}", file=path)
    if not lacks or not os.path.exists(trace):
        return load(directory)
    table, workload, schedule = _load_planned(path)
    return TracedRun(path, table, workload, schedule, MeasuredTrace(trace, workload.parallel))


def _load_planned(path: Path) -> tuple[cost.CostTable, Workload, Schedule]:
    at = {key: path / name for key, name in READ.items()}
    table = cost.load(at["cost_table"])
    workload = workload_file.load(at["workload"])
    schedule = validate.load(at["schedule"])
    match.match(schedule, workload, file=at["schedule"])
    planned_by = schedule.metadata.cost_table_sha256
    if planned_by is not None and planned_by != json_files.sha256(at["cost_table"]):
        said = "planned with another cost table than the one in this directory"
        Checker(at["schedule"]).refuse(said, "metadata.cost_table_sha256", planned_by[:12])
    return table, workload, schedule


def load(directory) -> RunDir:
    """Read a run directory.

    Raises:
        InputError: a file is missing or damaged, or two files are not from the same run.
    """
    path = Path(directory)
    if not os.path.isdir(path):
        raise InputError("not a directory", file=path)
    table, workload, schedule = _load_planned(path)
    at = {key: path / name for key, name in READ.items()}
    gathers_only = _gathers_only(path / GATHERS_ONLY, workload)
    scheduled = metrics_file.load(at["scheduled_metrics"])
    stock = _same_length(at["stock_metrics"], scheduled)
    reference = _same_length(at["reference_metrics"], scheduled) if at["reference_metrics"].exists() else None
    world = workload.parallel.world_size
    for key, metrics in (("scheduled_metrics", scheduled), ("stock_metrics", stock), ("reference_metrics", reference)):
        if metrics is not None and len(metrics.parameter_sha256) != world:
            held = len(metrics.parameter_sha256)
            Checker(at[key]).refuse(f"has {held} entries for {world} ranks", "parameter_sha256")
    stock_trace, trace = (
        MeasuredTrace(at[key], workload.parallel, scheduled.iterations) for key in ("stock_trace", "scheduled_trace")
    )
    return RunDir(path, table, workload, schedule, trace, stock, scheduled, reference, stock_trace, gathers_only)


def _gathers_only(path: Path, workload: Workload) -> Schedule | None:
    if workload.zero_stage < 3 or not path.exists():
        return None
    schedule = validate.load(path)
    match.match(schedule, workload, file=path)
    routes = {action.route for action in schedule.unshards}
    if routes - {"gpu"}:
        raise InputError("expected all-gathers alone", file=path, field="route", value=sorted(routes - {"gpu"})[0])
    return schedule


def _same_length(path: Path, scheduled: Metrics) -> Metrics:
    metrics = metrics_file.load(path)
    if metrics.iterations != scheduled.iterations:
        said = f"has {metrics.iterations} iterations, the scheduled run {scheduled.iterations}"
        Checker(path).refuse(said, "loss")
    return metrics
