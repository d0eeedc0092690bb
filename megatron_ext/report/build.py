"""From the files of a run to the figures of its report."""

from typing import NamedTuple

from megatron_ext import simulator
from megatron_ext.report.equality import Equality, compare, largest_loss_difference
from megatron_ext.report.measured import MeasuredTrace
from megatron_ext.report.run_dir import RunDir
from megatron_ext.report.spread import Spread, spread, summarize, warm_up
from megatron_ext.schedule.model import Schedule
from megatron_ext.schedule.trace import Event
from megatron_ext.simulator.simulate import with_prediction
from megatron_ext.simulator.verdict import verdict
from megatron_ext.workload.route import ROUTES

GATHER_LANES = ("issue", "wait")
"""The training thread's time in gathers: issuing them, publishing for them, waiting for them."""


class Pair(NamedTuple):
    """The same figure of both runs."""

    stock: float | Spread | None
    scheduled: float | Spread | None


class Report(NamedTuple):
    """Figures of one run directory; times in microseconds.

    ``gather_us``, ``exposed_us``, ``step_time_us``: measured, pairs of :class:`Spread`; the
    first two are, per iteration, the largest over ranks. ``period_us``: the same from the end of
    one iteration to the end of the next, None where no two follow each other. ``predicted_step_time_us``: a pair
    of numbers; the scheduled one is what the schedule holds, the stock one is simulated from
    the same table. ``loss_difference``: the largest relative one of scheduled from stock,
    None where no loss is a number. ``routes``: groups that the schedule brings by each route.
    ``simulated``: events of both simulated iterations.
    """

    run: RunDir
    equality: Equality
    warm_up: int
    gather_us: Pair
    exposed_us: Pair
    step_time_us: Pair
    period_us: Pair
    predicted_step_time_us: Pair
    verdict: str
    loss_difference: float | None
    routes: dict[str, int]
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
    judged = verdict(run.workload, run.table, schedule, extrapolate=extrapolate)
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
        period_us=Pair(*(_periods(measured[which], run.iterations) for which in Pair._fields)),
        predicted_step_time_us=Pair(stock.step_time_us, schedule.predicted.step_time_us),
        verdict=judged.text,
        loss_difference=largest_loss_difference(run.stock, run.scheduled),
        routes=_groups_by_route(run.schedule),
        simulated={"stock": stock.events, "scheduled": ours.events},
    )


def _periods(trace: MeasuredTrace, iterations: int) -> Spread | None:
    warm = [us for iteration, us in trace.periods_us().items() if iteration > warm_up(iterations)]
    return summarize(warm) if warm else None


def _groups_by_route(schedule: Schedule) -> dict[str, int]:
    routes = {
        (action.group, action.route)
        for rank in schedule.ranks
        for entry in (rank.start, *rank.steps)
        for action in entry.unshard
    }
    return {route: sum(route == taken for _, taken in routes) for route in ROUTES if any(route == taken for _, taken in routes)}
