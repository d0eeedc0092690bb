"""From the files of a run to the figures of its report."""

from typing import NamedTuple

from megatron_ext import planner, simulator
from megatron_ext.report.equality import Equality, compare
from megatron_ext.report.run_dir import RunDir
from megatron_ext.report.spread import Spread, spread, warm_up
from megatron_ext.schedule.trace import Event
from megatron_ext.simulator.simulate import with_prediction

GATHER_LANES = ("issue", "wait")
"""The training thread's time in gathers: issuing them, publishing for them, waiting for them."""


class Pair(NamedTuple):
    """The same figure of both runs."""

    stock: float | Spread
    scheduled: float | Spread


class Report(NamedTuple):
    """Figures of one run directory; times in microseconds.

    ``gather_us``, ``exposed_us``, ``step_time_us``: measured, pairs of :class:`Spread`; the
    first two are, per iteration, the largest over ranks. ``predicted_step_time_us``: a pair
    of numbers; the scheduled one is what the schedule holds, the stock one is simulated from
    the same table. ``simulated``: events of both simulated iterations.
    """

    run: RunDir
    equality: Equality
    warm_up: int
    gather_us: Pair
    exposed_us: Pair
    step_time_us: Pair
    predicted_step_time_us: Pair
    verdict: str
    simulated: dict[str, list[Event]]

    def relative_error(self, which: str) -> float:
        """How far the prediction is from the measured median, relative to the measured one."""
        measured = getattr(self.step_time_us, which).median_us
        return getattr(self.predicted_step_time_us, which) / measured - 1.0


def build(run: RunDir, *, extrapolate: bool = False) -> Report:
    """Work out every figure of the report.

    Raises:
        InputError: the cost table lacks a figure that the prediction needs.
    """
    ours = simulator.simulate(run.workload, run.table, run.schedule, trace=True, extrapolate=extrapolate)
    stock = simulator.simulate(run.workload, run.table, trace=True, extrapolate=extrapolate)
    # A schedule written by hand holds no prediction.
    schedule = run.schedule if run.schedule.predicted is not None else with_prediction(run.schedule, ours)
    judged = planner.verdict(run.workload, run.table, schedule, extrapolate=extrapolate)
    measured = {"stock": run.stock_trace, "scheduled": run.scheduled_trace}

    def lanes(*names: str) -> Pair:
        return Pair(*(spread(measured[which].thread_us(names)) for which in Pair._fields))

    return Report(
        run=run,
        equality=compare(run.reference, run.scheduled),
        warm_up=warm_up(run.iterations),
        gather_us=lanes(*GATHER_LANES),
        exposed_us=lanes("wait"),
        step_time_us=Pair(spread(run.stock.iteration_us), spread(run.scheduled.iteration_us)),
        predicted_step_time_us=Pair(stock.step_time_us, schedule.predicted.step_time_us),
        verdict=judged.text,
        simulated={"stock": stock.events, "scheduled": ours.events},
    )
