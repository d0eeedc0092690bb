"""Computes the figures of a report from the files of a run."""

from collections.abc import Sequence
from statistics import median
from typing import Any, NamedTuple

import msgspec

from megatron_ext.formats.rank_memory import RankMemory
from megatron_ext.formats.trace import Event
from megatron_ext.planner.evaluate import evaluate
from megatron_ext.planner.verdict import Verdict, verdict
from megatron_ext.report.equality import Equality, compare_metrics
from megatron_ext.report.links_busy import Hidden, hidden, moving, over_iterations, shares
from megatron_ext.report.measured_trace import MeasuredTrace
from megatron_ext.report.moved import Moved, moved
from megatron_ext.report.parts import TimePart, launches, parts
from megatron_ext.report.run_dir import RunDir
from megatron_ext.report.spread import Spread, summarize
from megatron_ext.report.turn_ratio import TurnRatio, check_verdict, turn_ratio
from megatron_ext.simulator.simulation import with_prediction
from megatron_ext.simulator.timing import Timing
from megatron_ext.workload.workload import Limits

GATHER_LANES = ("issue", "wait")
"""Lanes of the training thread's time in gathers: issuing gathers and publishing, and waiting for gathers."""


class Pair(NamedTuple):
    """One figure of both runs."""

    stock: Any
    scheduled: Any


class MeasuredPair(NamedTuple):
    """One measured figure of both runs; None if stock training was not measured."""

    stock: Spread | None
    scheduled: Spread


class Report(NamedTuple):
    """Figures of one run directory; times in microseconds. ``stock`` of a pair is the run that the schedule is compared
    with (:class:`megatron_ext.report.run_dir.RunDir`): at zero stage 3 the best plan by all-gathers alone.

    ``gather_us``, ``exposed_us``, ``iteration_time_us``: measured; the first two are, per iteration, the largest over
    ranks. ``period_us``: the time from the end of one iteration to the end of the next; None if no two iterations
    follow each other. ``predicted_iteration_time_us``: a pair of numbers. The scheduled one is stored in the schedule,
    the other one is simulated from the same table. ``measured_ratio``: the ratio of iteration times, if the runs took
    turns. ``verdict_was``: whether this ratio confirms the verdict
    (:func:`megatron_ext.report.turn_ratio.check_verdict`). ``simulated``: events of the simulated iteration.
    ``memory``: by pipeline rank, the bill and the census of the data-parallel rank whose device held the most; empty if
    the run took no census. ``links_busy``: ``measured`` and ``simulated`` shares of the scheduled iteration in which
    each link carries bytes and in which all links do (:func:`megatron_ext.report.links_busy.shares`). ``hidden``:
    ``measured`` and ``simulated`` work that was hidden behind compute (:mod:`megatron_ext.report.links_busy`).
    ``moved``: by rank, the billed and the counted bytes; empty if the trace has no counts. ``parts``: of the scheduled
    iteration, measured and simulated (:mod:`megatron_ext.report.parts`).
    """

    run: RunDir
    equality: Equality
    gather_us: MeasuredPair
    exposed_us: MeasuredPair
    iteration_time_us: MeasuredPair
    period_us: Pair
    predicted_iteration_time_us: Pair
    verdict: Verdict
    measured_ratio: TurnRatio | None
    verdict_was: str | None
    simulated: list[Event]
    links_busy: dict[str, dict[str, float]]
    hidden: dict[str, dict[str, Hidden]]
    moved: list[Moved]
    memory: tuple[tuple[RankMemory, RankMemory], ...] = ()
    parts: tuple[TimePart, ...] = ()

    @property
    def missed_us(self) -> float:
        """Microseconds by which the scheduled iteration took longer than predicted."""
        return self.iteration_time_us.scheduled.median_us - self.predicted_iteration_time_us.scheduled

    @property
    def relative_error(self) -> Pair:
        """The difference of the prediction from the measured median, relative to the measured median."""
        both = zip(self.predicted_iteration_time_us, self.iteration_time_us)
        return Pair(*(measured and predicted / measured.median_us - 1.0 for predicted, measured in both))


def build(run: RunDir, *, extrapolate: bool = False) -> Report:
    """Compute every figure of the report.

    Raises:
        InputError: the cost table lacks a figure that the prediction needs.
    """
    ours = evaluate(run.workload, run.table, run.schedule, trace=True, extrapolate=extrapolate)
    compared = run.workload
    if run.gathers_only is None:  # stock Megatron has no zero stage 3, and does not keep the limits
        zero_stage = compared.zero_stage if compared.zero_stage < 3 else 1
        compared = msgspec.structs.replace(compared, zero_stage=zero_stage, limits=Limits())
    stock = evaluate(compared, run.table, run.gathers_only, extrapolate=extrapolate)
    # A schedule that was written by hand has no prediction.
    schedule = run.schedule if run.schedule.predicted is not None else with_prediction(run.schedule, ours)
    assert schedule.predicted is not None and ours.events is not None
    judged = verdict(run.workload, run.table, schedule, extrapolate=extrapolate, as_trained=True)
    traces, turn_iterations, indices = (run.stock_trace, run.scheduled_trace), run.turn_iterations, run.counted
    windows = [run.scheduled_trace.window(index + 1) for index in indices]
    simulated, *measured = (
        moving(events, run.workload.parallel, run.schedule.groups)
        for events in (ours.events, *(window.events for window in windows))
    )

    def spread(values: Sequence[float]) -> Spread:
        return summarize([values[index] for index in indices])

    def lanes(*names: str) -> MeasuredPair:
        found = run.stock_trace and spread(run.stock_trace.thread_us(names))
        return MeasuredPair(found, spread(run.scheduled_trace.thread_us(names)))

    took, of_stock = run.iteration_us, run.stock.iteration_us if run.stock is not None else None
    ends = [window.end_us for window in windows]
    # Where the iteration itself begins, after the pause and evaluations before it.
    begins = [max(window.end_us - took[window.iteration - 1], 0.0) for window in windows]
    found = parts(simulated, ours.iteration_time_us, measured, spread(took).median_us, run.on_device)
    ratio = turn_ratio(of_stock, took, turn_iterations, indices) if of_stock and turn_iterations else None
    return Report(
        run=run,
        equality=compare_metrics(run.reference, run.scheduled),
        gather_us=lanes(*GATHER_LANES),
        exposed_us=lanes("wait"),
        iteration_time_us=MeasuredPair(spread(of_stock) if of_stock else None, spread(took)),
        period_us=Pair(*(trace and _periods(trace, indices) for trace in traces)),
        predicted_iteration_time_us=Pair(stock.iteration_time_us, schedule.predicted.iteration_time_us),
        verdict=judged,
        measured_ratio=ratio,
        verdict_was=check_verdict(judged.figures["answer"], ratio.ratio, ratio.standard_error) if ratio else None,
        simulated=ours.events,
        memory=_memory(run, [bill.memory for bill in ours.memory]),
        parts=found + launches(run, ours, Timing(run.workload, run.table, extrapolate=extrapolate), indices),
        links_busy={
            "measured": _medians([shares(*each) for each in zip(measured, ends, begins)]),
            "simulated": shares(simulated, ours.iteration_time_us),
        },
        hidden={"measured": over_iterations([*map(hidden, measured)]), "simulated": hidden(simulated)},
        moved=moved(run.schedule, run.workload, run.scheduled_trace.moved_bytes, indices),
    )


def _medians(found: list[dict[str, float]]) -> dict[str, float]:
    # Leave out links that are missing in some iterations: on CUDA all-gathers are not recorded.
    return {name: median(share[name] for share in found) for name in found[0] if all(name in share for share in found)}


def _memory(run: RunDir, bills: list[RankMemory]) -> tuple[tuple[RankMemory, RankMemory], ...]:
    census, parallel = run.scheduled and run.scheduled.census, run.workload.parallel
    if not census:
        return ()
    ranks = parallel.world_size // parallel.pp  # of one pipeline rank, next to each other
    counted = [
        max(census[pp_rank * ranks : (pp_rank + 1) * ranks], key=lambda held: held.device_total_bytes)
        for pp_rank in range(parallel.pp)
    ]
    return tuple(zip(bills, counted))


def _periods(trace: MeasuredTrace, indices: list[int]) -> Spread | None:
    periods = trace.periods_us()
    warm = [periods[index + 1] for index in indices if index + 1 in periods]
    return summarize(warm) if warm else None
