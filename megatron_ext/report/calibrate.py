"""Corrects a cost table with the figures of a run, so that the next plan is more accurate.

[Note: What is calibrated]
The run's schedule is simulated on the table. If a part was measured, the figures of the table that it was simulated
from are multiplied by measured time / simulated time: compute of each chunk and direction, each route, the reduce,
messages, publishing, the optimizer and the host's step. So a curve gets the time that it has in this run, with
everything that runs at the same time, and keeps its shape. An all-gather counts from when its slowest rank has issued
it. A reduce that waits for its slowest rank counts with that wait.
Reads and writes of optimizer states on a drive get the same factor. So do the curves of publishing that the schedule
uses (into host copies, onto drives, between nodes): a run records one time for all of them. Only the part of Megatron's
optimizer step that is not in the run's own steps of groups is corrected. For a reduce a run records only the waits for
it. The difference between measured and simulated waits is added to the reduce. If compute hides the reduce, and the
waits are shorter than the error that any curve may have, it is not corrected.
Links slow each other down, and compute that hides a part of a reduce hides the same part of a longer one. So the run is
simulated on the corrected table, and the table is corrected again, until no figure changes. A figure on which a time of
this run hardly depends never settles: publishing limited by host memory, a reduce that compute hides. It is left as
given, the worst first, and the others go on. The next plan may depend on figures that this run does not show:
calibrate, plan and run again until only the machine's own variation is left.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from statistics import median
from typing import NamedTuple

from msgspec.structs import replace

from megatron_ext.cost import cost_table as cost
from megatron_ext.cost.cost_table import Compute, CostTable, Curve, Point, Routes
from megatron_ext.cost.curve import has_points
from megatron_ext.cost.environment import run_differences
from megatron_ext.cost.estimates import Costs
from megatron_ext.cost.perturbed_table import SYSTEMATIC
from megatron_ext.cost.scaled_table import scaled_launches, scaled_row, with_factors
from megatron_ext.formats.errors import InputError
from megatron_ext.formats.trace import Event
from megatron_ext.planner.evaluate import evaluate
from megatron_ext.report.links_busy import moving
from megatron_ext.report.parts import BACKWARD, FORWARD, OPTIMIZER, apart, launches, part_of
from megatron_ext.report.run_dir import RunDir
from megatron_ext.report.spread import WARM_UP
from megatron_ext.simulator.thread_path import LAUNCHES
from megatron_ext.simulator.timing import Timing
from megatron_ext.workload.step import Step
from megatron_ext.workload.workload import Workload, optimizer_bytes

CURVES = {
    "gpu": "routes.gpu",
    "cpu": "routes.cpu",
    "nvme": "routes.nvme",
    **{curve: curve for curve in ("publish.cpu", "publish.nvme", "publish.internode")},
    "p2p": "p2p",
    "reduce": "reduce",
    "optimizer": "optimizer",
    "host_step": "host_step",
    "host_add": "host_add",
    "launches": "launches",
}
"""By part, the curve of the table that its time comes from."""

MOST = 100.0
"""The largest ratio of a measured time to the one that the given table predicts. A run with a larger one does not
belong to this table. It also limits factors."""

ROUNDS, SETTLED = 20, 0.01
"""The most corrections of a table before a figure is left as given, and the change of a factor below which it has
settled."""

NOT_CORRECTED = "not corrected, because the run does not use it, record it or wait for it"
UNSETTLED = "unsettled: left as given, because no factor brings its simulated time to that of the run"
"""Start of the notes on figures that were not corrected. A plan by the corrected table relies on these as well."""

Times = dict[tuple[str, int, int], float]
"""Microseconds by part, pipeline rank and model chunk (0 except for compute)."""


class Calibrated(NamedTuple):
    """``factors``: the factor of each corrected figure of the table. ``left``: curves of the table that the run says
    nothing about. ``unsettled``: figures that no factor brings to the measured time. ``error_before``,
    ``error_after``: predicted / measured iteration time - 1."""

    table: CostTable
    factors: dict[str, float]
    left: tuple[str, ...]
    unsettled: tuple[str, ...]
    error_before: float
    error_after: float


def calibrate(run: RunDir, table: CostTable | None = None, *, extrapolate: bool = False) -> Calibrated:
    """The table (by default the run's own), corrected by the scheduled training of ``run``.

    Raises:
        InputError: the table is for other sizes or another model than the run, the run measured no part of it, or a
            figure differs from it by more than :data:`MOST`.
    """
    given = run.table if table is None else table
    differ = run_differences(given.metadata, run.workload)
    if differ:
        raise InputError("; ".join(differ) + "; calibrate needs the table of the same run", field="metadata")
    indices = run.counted
    if indices[0] < WARM_UP:
        raise InputError(f"has too few iterations: the first {WARM_UP} do not count", file=run.file("scheduled_trace"))
    published = _published(run, Timing(run.workload, given, extrapolate=extrapolate))
    windows = [_times(run.scheduled_trace.window(index + 1).events, run, published) for index in indices]
    measured = {key: median(each.get(key, 0.0) for each in windows) for key in {key for one in windows for key in one}}
    took = run.iteration_us
    measured_us = median(took[index] for index in indices)

    def simulated(timing: Timing) -> tuple[Times, float]:
        result = evaluate(run.workload, timing.table, run.schedule, trace=True, extrapolate=extrapolate)
        times = _times(result.events or (), run, published)
        for thread in launches(run, result, timing, indices):
            if thread.limits:
                times = {key: us for key, us in times.items() if key[0] not in (FORWARD, BACKWARD, OPTIMIZER)}
            if thread.limits or thread.difference_us < 0:
                times[LAUNCHES, 0, 0], measured[LAUNCHES, 0, 0] = thread.predicted_us, thread.measured_us or 0.0
        return times, result.iteration_time_us

    made, factors, predicted_us, rounds, unsettled = given, Times(), list[float](), 0, set[tuple[str, int, int]]()
    while True:
        predicted, us = simulated(timing := Timing(run.workload, made, extrapolate=extrapolate))
        found = _factors(measured, predicted, run.workload, timing)
        first = not predicted_us
        if beyond := [_name(*key) for key, by in found.items() if first and not 1 / MOST <= by <= MOST]:
            why = f"differs from the run by more than {MOST:g} times"
            raise InputError(why, file=run.path, field=", ".join(beyond))
        found = {key: by for key, by in found.items() if key not in unsettled and (first or abs(by - 1) > SETTLED)}
        predicted_us.append(us)
        if not found:
            break
        stuck = {key for key in found if factors.get(key) in (1 / MOST, MOST)}
        if rounds == ROUNDS and not stuck:
            worst = max(found.values(), key=lambda by: abs(math.log(by)))  # curves of publishing have one factor
            stuck = {key for key, by in found.items() if by == worst}
        unsettled, rounds = unsettled | stuck, 1 if stuck else rounds + 1
        factors |= {key: min(max(factors.get(key, 1.0) * by, 1 / MOST), MOST) for key, by in found.items()}
        factors = {key: by for key, by in factors.items() if key not in unsettled}
        made = _scaled(given, factors, timing.ranks)
    if not factors and not unsettled:
        raise InputError("no part of it was both measured and simulated", file=run.path, field="scheduled_trace")
    others = [curve for part, curve in CURVES.items() if (part, -1, 0) not in factors.keys() | unsettled]
    told = lambda curve: timing.launches if curve == LAUNCHES else has_points(cost.part_named(given, curve))
    left = tuple(filter(told, others))
    named, still = {_name(*key): by for key, by in sorted(factors.items())}, [_name(*key) for key in sorted(unsettled)]
    before, *_, after = (us / measured_us - 1 for us in predicted_us)
    return Calibrated(_noted(made, named, uncorrected(left, still)), named, left, tuple(still), before, after)


def _published(run: RunDir, timing: Timing) -> list[str]:
    """The curves that the run's publishing takes its time from. Copies of gradients to host memory are in the same
    lane, and are read from the curve of host copies."""
    nodes = ["internode"] * (max(timing.crosses_nodes) > 1)
    to = {f"publish.{each}" for entry in run.schedule.publish for each in (*entry.to, *nodes)}
    if not to or run.workload.optimizer.on_host:
        to.add("publish.cpu")
    return [*filter(timing.offers_curve, to)]


def _times(events: Iterable[Event], run: RunDir, published: Iterable[str]) -> Times:
    """Times of all parts, means over the ranks of a pipeline rank. A transfer counts from when all of its ranks have
    issued it. An interval of publishing counts for each of the curves ``published``, and one of a drive that optimizer
    states pass through also for that of its writes."""
    states = ["publish.nvme"] * (run.schedule.state_slots is not None)
    also, parallel = {"publish": published, "nvme": ["nvme", *states]}, run.workload.parallel
    moved = moving(events, parallel, run.schedule.groups)
    found: defaultdict[tuple[str, int, int], float] = defaultdict(float)
    ranks: defaultdict[int, set[int]] = defaultdict(set)
    for event in apart(moved, run.on_device, by_optimizer=("host_step", "nvme")):
        pp_rank = event.rank // (parallel.world_size // parallel.pp)
        part = part_of(event)
        chunk = Step.parse(event.name).model_chunk_id(parallel.pp) if part in (FORWARD, BACKWARD) else 0
        ranks[pp_rank].add(event.rank)
        for own in also.get(part, (part,)):
            found[own, pp_rank, chunk] += event.duration_us
    return {key: us / len(ranks[key[1]]) for key, us in found.items()}


def _factors(measured: Times, predicted: Times, workload: Workload, timing: Timing) -> Times:
    """Measured time / simulated time. Compute has a factor for each chunk if the table has a row for it. Other parts
    have one factor over all pipeline ranks. The optimizer's factor is that of its whole curve. The factor of a reduce
    that is not recorded comes from the waits for it."""
    measured, predicted = measured.copy(), predicted.copy()
    for pp_rank in range(workload.parallel.pp):
        step, reduce, wait = ((part, pp_rank, 0) for part in (OPTIMIZER, "reduce", "reduce_wait"))
        if step in predicted:
            rest_us = timing.optimizer_us(optimizer_bytes(workload, pp_rank)) - predicted[step]
            predicted[step] += rest_us
            measured[step] = measured.get(step, 0.0) + rest_us
        us, waits = predicted.get(reduce, 0.0), (measured.get(wait, 0.0), predicted.get(wait, 0.0))
        if wait in measured and reduce not in measured and max(waits) > SYSTEMATIC * us:
            measured[reduce] = us + waits[0] - waits[1]
    both = {key: (measured[key], us) for key, us in predicted.items() if us > 0 and measured.get(key, 0.0) > 0}
    sums: defaultdict[tuple[str, int, int], list[float]] = defaultdict(lambda: [0.0, 0.0])
    rows = {(row.pp_rank, row.model_chunk_id) for row in timing.table.compute}
    for (part, pp_rank, chunk), (theirs, ours) in both.items():
        if part in (*CURVES, FORWARD, BACKWARD):
            key = (part, pp_rank, chunk) if part not in CURVES and (pp_rank, chunk) in rows else (part, -1, 0)
            sums[key][0] += theirs
            sums[key][1] += ours
    return {key: theirs / ours for key, (theirs, ours) in sums.items()}


def _name(part: str, pp_rank: int, chunk: int) -> str:
    return CURVES.get(part, f"compute.{part}" + (f" of rank {pp_rank}, chunk {chunk}" if pp_rank >= 0 else ""))


def uncorrected(left: Sequence[str], unsettled: Sequence[str]) -> list[str]:
    """Lines about figures that were not corrected."""
    return [f"{why}: {', '.join(names)}" for why, names in ((NOT_CORRECTED, left), (UNSETTLED, unsettled)) if names]


def _noted(table: CostTable, named: dict[str, float], lines: list[str]) -> CostTable:
    told = ", ".join(f"{name} x {factor:.3g}" for name, factor in named.items()) or "nothing"
    notes = (*table.metadata.notes, f"calibrated by a run: {told}", *lines)
    return replace(table, metadata=replace(table.metadata, notes=notes))


def _scaled(table: CostTable, factors: Times, ranks: int) -> CostTable:
    by_curve = {CURVES[part]: factor for (part, *_), factor in factors.items() if part in CURVES}
    # The run made its own host step. Megatron's own is a part of the optimizer's step.
    made = with_factors(table, by_curve, lambda row: _row(row, factors), of_algorithms=("host_step",))
    made = scaled_launches(made, by_curve.get(LAUNCHES, 1.0))
    return cost.check(replace(made, routes=scaled_routes(table, made, by_curve, ranks)))


def scaled_routes(table: CostTable, made: CostTable, by_curve: dict[str, float], ranks: int) -> Routes:
    """The routes of ``made``. The drive's measured route ends with a copy to the device, and ``cpu_shard`` begins with
    that of one of ``ranks`` shards. Copies have their own factor, and the all-gathers of shards that of ``gpu``."""
    copies = [Costs(each, extrapolate=True) for each in (table, made)]

    def scaled(name: str, other: str, parts: int) -> Curve | None:
        def whole(point: Point) -> Point:
            before, after = (each.estimate("routes.cpu", point.size_bytes // parts).us for each in copies)
            us = max(point.p50_us - before, 0.0) * by_curve.get(other, 1.0) + after
            return replace(point, p50_us=us, p95_us=None)

        given = getattr(table.routes, name)
        if given is None or not {"routes.cpu", other} & by_curve.keys() or not has_points(table.routes.cpu):
            return getattr(made.routes, name)
        return cost.with_points(given, lambda _, points: tuple(map(whole, points)))

    nvme, cpu_shard = scaled("nvme", "routes.nvme", 1), scaled("cpu_shard", "routes.gpu", ranks)
    return replace(made.routes, nvme=nvme, cpu_shard=cpu_shard)


def _row(row: Compute, factors: Times) -> Compute:
    """``row`` multiplied by its factor. A chunk's row has its own factor. The row of a layer kind has the factor of
    chunks without a row, or the mean factor of all chunks if every chunk has a row."""
    of_kind = row.layer_kind is not None
    place = (-1, 0) if of_kind else (row.pp_rank, row.model_chunk_id)
    own = {part: by for (part, *of), by in factors.items() if (*of,) == place and part not in CURVES}
    for way in (FORWARD, BACKWARD) if of_kind else ():
        others = [by for (part, *_), by in factors.items() if part == way]
        own.setdefault(way, sum(others) / max(len(others), 1) or 1.0)
    return scaled_row(row, own)
