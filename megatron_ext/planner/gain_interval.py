"""The interval in which a gain lies, given the errors of a cost table and of the simulator.

[Note: The interval of a gain]
Both plans are simulated on the same perturbed tables (:mod:`megatron_ext.cost.perturbed_table`), so that errors which
both plans share cancel. The plan was chosen because it is fast on the given table, which may partly be chance (winner's
curse). Therefore the expected gain is the median over perturbed tables, on which the plan was not chosen. The gain on
the given table may lie outside the interval. Estimated parts of the tables are those of machines drawn from the ranges
of the data sheet (:func:`megatron_ext.cost.estimated_table.parts_on_machines`). The ends of the interval are the 5th
and the 95th percentile, moved outwards by the simulator's own error, which was calibrated on measured runs.
"""

from collections.abc import Sequence
from functools import partial
from itertools import cycle
from math import hypot
from typing import NamedTuple

import numpy

from megatron_ext.cost.cost_table import CostTable, with_parts
from megatron_ext.cost.estimated_table import parts_on_machines
from megatron_ext.cost.hardware_sheet import drawn, drawn_machines, slow_end
from megatron_ext.cost.perturbed_table import PerturbedTables
from megatron_ext.formats.errors import InputError
from megatron_ext.planner.effort import number_of_steps, visits_of_gradients
from megatron_ext.planner.in_processes import in_processes
from megatron_ext.schedule.user_defined_schedule import Schedule
from megatron_ext.simulator.simulation import Result, simulate
from megatron_ext.simulator.timing import Timing
from megatron_ext.workload.workload import Workload

MODEL_ERROR = 0.02
"""Standard deviation of the ratio measured / predicted, for the ratio of two plans' iteration times. It is the part
that perturbed costs and the measurement's own standard error do not explain. It was calibrated by maximum likelihood on
16 pairs of runs over a slow network (a benchmark's result of 2026-11-23, in this repository's history): 1.6 % around a
mean of 2.6 %, because stock Megatron was slower than predicted. The mean is not corrected."""

WIDTH = 1.645
"""Half the width of the 90 % interval, in standard deviations."""

MARGIN = 2.33
"""The same for the 98 % interval, whose lower end must be above zero for the answer "helps"."""

EFFORT = 1_000_000
"""Steps, gathers and visits of gradients that may be simulated. As in the search, the effort is not measured by a
clock, so that the same files give the same answer everywhere."""
FEWEST, MOST, MACHINES = 24, 128, 64
"""Fewest and most perturbed tables, and machines that are drawn for them. The larger the workload, the fewer tables are
used."""


class Gain(NamedTuple):
    """The gain in iteration time of a plan over another one: 1 - plan / other.

    Attributes:
        gain: the expected gain: the median over perturbed tables. It lies in the interval.
        on_table: the gain on the given table, on which the plan was chosen.
        low, high: the ends of the interval (90 %).
        surely: the lower end of the wider interval (98 %).
        samples: number of perturbed tables.
        missing: the figures that the table lacks, and the ranges from which they were drawn.
        by_model: whether the simulator's own error contributes more to the interval than the costs do.
    """

    gain: float
    on_table: float
    low: float
    high: float
    surely: float
    samples: int
    missing: tuple[str, ...]
    by_model: bool


class GainOnTables(NamedTuple):
    """Computes the gain of ``plan`` over ``other`` on one cost table after another."""

    workload: Workload
    plan: Schedule
    other: Schedule
    extrapolate: bool

    def results(self, table: CostTable) -> list[Result]:
        """The simulated iterations of the plan and of the other one."""
        timing = Timing(self.workload, table, extrapolate=self.extrapolate)
        return [simulate(self.workload, timing, each, peaks=False) for each in (self.plan, self.other)]

    def on(self, table: CostTable) -> float:
        """The gain on ``table``."""
        plan, other = self.results(table)
        return 1 - plan.iteration_time_us / other.iteration_time_us


def gain_interval(
    workload: Workload, table: CostTable, plan: Schedule, other: Schedule, *, extrapolate: bool = False
) -> Gain:
    """The gain of ``plan`` over ``other`` with its interval.

    Raises:
        InputError: the table lacks a figure that a plan needs.
    """
    gains = GainOnTables(workload, plan, other, extrapolate)
    ours, theirs = gains.results(table)
    on_table = 1 - ours.iteration_time_us / theirs.iteration_time_us
    if _same(plan, other):
        return Gain(0.0, 0.0, 0.0, 0.0, 0.0, 0, (), False)
    tables = _tables(table, ours, theirs)
    samples = tables_to_draw(workload, plan, other)
    machines = parts_on_machines(table, workload, lambda sheet: drawn_machines(sheet, min(samples, MACHINES)))
    found = _on_all(gains, [with_parts(*each) for each in zip(tables.draw(samples), cycle(machines))])
    centre, lowest, highest = (float(value) for value in numpy.quantile(found, (0.5, 0.05, 0.95)))
    up, down = model_error(ours, theirs)
    few = 1 + 2 / samples
    below = hypot(centre - lowest, WIDTH * down) * few
    above = hypot(highest - centre, WIDTH * up) * few
    surely = centre - below * MARGIN / WIDTH
    by_model = WIDTH * (up + down) > highest - lowest
    return Gain(centre, on_table, centre - below, centre + above, surely, samples, tables.missing, by_model)


def dominant_cost(
    workload: Workload, table: CostTable, plan: Schedule, other: Schedule, *, extrapolate: bool = False
) -> str | None:
    """The cost whose standard deviation moves the gain most, one cost at a time; None where none moves it. An estimated
    cost moves from its value to its slow end."""
    gains = GainOnTables(workload, plan, other, extrapolate)
    tables = _tables(table, *gains.results(table))
    costs = [*dict.fromkeys(tables.costs)]
    machines = parts_on_machines(table, workload, lambda sheet: (drawn(sheet, slow_end), sheet))
    ends = dict(zip((1.0, -1.0), cycle(machines)))
    at_end = lambda cost, by: {name: part for name, part in ends[by].items() if f"{cost}.".startswith(f"{name}.")}
    shifted = _on_all(gains, [with_parts(tables.shifted(cost, by), at_end(cost, by)) for cost in costs for by in ends])
    moves = dict(zip(costs, abs(shifted[::2] - shifted[1::2]).tolist()))
    cost = max(moves, key=lambda name: moves[name], default=None)
    return cost if cost is not None and moves[cost] > 0 else None


def _on_all(gains: GainOnTables, tables: Sequence[CostTable]) -> numpy.ndarray:
    """The gains on all ``tables``. Raises InputError if one of them lacks a figure."""
    effort = len(tables) * effort_of(gains.workload, gains.plan, gains.other)
    found = in_processes([partial(gains.on, each) for each in tables], effort)
    for gain in found:
        if isinstance(gain, InputError):
            raise gain
    return numpy.array(found)


def _tables(table: CostTable, ours: Result, theirs: Result) -> PerturbedTables:
    """Perturbed tables around ``table`` for everything that occurs in either plan."""
    return PerturbedTables(table, sorted(set(ours.busy_us) | set(theirs.busy_us)))


def _same(plan: Schedule, other: Schedule) -> bool:
    """Whether both plans do the same at the same steps. Names and metadata do not count."""
    parts = "groups ranks publish state_slots step_slots rollback_bytes".split()
    return all(getattr(plan, part) == getattr(other, part) for part in parts)


def tables_to_draw(workload: Workload, *schedules: Schedule) -> int:
    return max(FEWEST, min(MOST, EFFORT // effort_of(workload, *schedules)))


def effort_of(workload: Workload, *schedules: Schedule) -> int:
    """What simulating all ``schedules`` once counts as, in steps."""
    visits = sum(len(each.unshards) + visits_of_gradients(workload, each.groups) for each in schedules)
    return len(schedules) * number_of_steps(workload) + 4 * visits


def model_error(ours: Result, theirs: Result) -> tuple[float, float]:
    """Standard deviations of the gain due to the simulator's own error, upwards and downwards.

    A plan cannot gain more than the time for which the other one waits for groups, nor lose more than its own transfers
    take.
    """
    waits = max(theirs.exposed_us, default=0.0) / theirs.iteration_time_us
    transfers = (ours.gather_us + ours.busy_us.get("publish", 0.0)) / theirs.iteration_time_us
    return min(MODEL_ERROR, waits), min(MODEL_ERROR, transfers)
