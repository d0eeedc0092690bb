"""Figures that a prediction needs and the cost table lacks. They are refused by name or taken from a range.

[Note: What is refused and what is not]
A missing curve is refused, because nothing says how long that operation takes. Every other missing figure has a range
(:mod:`megatron_ext.cost.missing_ranges`). A prediction is then an interval, and so is the gain of a plan.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from megatron_ext.cost.cost_table import CostTable
from megatron_ext.cost.perturbed_table import PerturbedTables
from megatron_ext.formats.errors import InputError
from megatron_ext.schedule.user_defined_schedule import Schedule
from megatron_ext.simulator.simulation import Result, simulate
from megatron_ext.simulator.timing import Timing
from megatron_ext.workload.workload import Workload

_ON_HOST, _DRIVE = "--optimizer-on-host", "--nvme-path DIRECTORY"
_OPTIONS = {
    "publish.cpu": "--links publish",
    "publish.internode": "--links internode",
    "publish.nvme": _DRIVE,
    "routes.nvme": _DRIVE,
    "routes.cpu": "--links cpu",
    "host_step": _ON_HOST,
    "device_step": _ON_HOST,
}
"""Options of ``measure``, by missing curve. Curves that are not listed are links, and their option has the link's
name."""


class UnmeasuredRange(NamedTuple):
    """Iteration times if the unmeasured figures are at their fastest and at their slowest, and the names of these
    figures."""

    low_us: float
    high_us: float
    missing: tuple[str, ...]

    def text(self) -> str:
        interval = f"{self.low_us / 1e3:.3f} and {self.high_us / 1e3:.3f} ms"
        return f"not measured, so between {interval}: {'; '.join(self.missing)}"


def refuse_missing(names: Sequence[str], *, file=None) -> None:
    """Raises InputError if a curve that the prediction needs is missing. The message has the commands that measure
    it."""
    if names:
        curves = [name.partition(".algorithms")[0] for name in names]
        options = " ".join(dict.fromkeys(_OPTIONS.get(name, f"--links {name}") for name in curves))
        raise InputError(
            f"the prediction needs it and the table lacks it (all missing: {', '.join(names)}); megatron-ext measure "
            f"{options} measures it, cost estimate --hardware NAME estimates it, cost combine puts it into this table",
            file=file,
            field=names[0],
        )


def missing_curves(
    workload: Workload, table: CostTable, schedule: Schedule, *, extrapolate: bool = False
) -> tuple[str, ...]:
    """Curves that a prediction of ``schedule`` needs and the table lacks."""
    return simulate(workload, Timing(workload, table, extrapolate=extrapolate), schedule, peaks=False).left_out


def interval_of(table: CostTable, result: Result, predict: Callable[[CostTable], float]) -> UnmeasuredRange | None:
    """The interval of a prediction by ``predict``; None where nothing was missing."""
    tables = PerturbedTables(table, sorted(result.busy_us))
    if not tables.missing:
        return None
    times = [predict(tables.with_missing_at(part)) for part in (0.0, 1.0)]
    return UnmeasuredRange(min(*times, result.iteration_time_us), max(*times, result.iteration_time_us), tables.missing)
