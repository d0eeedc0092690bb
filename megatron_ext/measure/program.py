"""What a rank does: every curve at every size in several passes, then contention and compute.

[Note: Passes]
The whole grid is walked several times, for a machine that is shared changes its speed for seconds:
samples of one size that lie far apart say more than as many in a row. All count together; where the
medians of quarters of the time differ, the table says so itself. Sizes are refined behind the first
pass, where neighbours disagree. Every pass has another order. A visit takes so many rounds at most that where
transfers are short time is left after these passes: further ones use it. Host copies that took less than
``SHORT_US`` in the first pass are visited ``SHORT_VISITS`` times in each later one, for as many rounds together.

[Note: In the surroundings of the run]
Handed modules are made before anything is measured: what a framework adds to every call, and the
threads of the process groups that it makes, are there in training too.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from statistics import median
from time import monotonic

import torch.distributed as dist

from megatron_ext.measure import contention, grid, nvme, processors
from megatron_ext.measure.ends import sets_of_ranks, until_last
from megatron_ext.measure.fabric import Fabric
from megatron_ext.measure.operations import OPERATIONS
from megatron_ext.measure.options import MIB, Options
from megatron_ext.measure.sampling import MAX_ROUNDS, Samples, sample
from megatron_ext.measure.uncharged import Uncharged

PASSES, MAX_PASSES, QUARTERS = 5, 20, 4
CONTENTION_SHARE, COMPUTE_SHARE, SWEEP_SHARE = 0.25, 0.25, 0.1
"""Shares of the time; the curves have the rest. Of an iteration, compute is most, and processors that are
shared change their speed for seconds."""

QUIET_SHARE = 0.05
"""Of the time, beside it, in which the processors are watched while no rank does anything."""

SMALL_BYTES = 4096
"""Below this there is only the least size."""

GATHERS = {"gpu", "hierarchical", "cpu", "nvme"}
"""The routes, all of their ways."""

SHORT_US, SHORT_VISITS = 3000.0, 4
"""All rounds of a short copy in a row are over within milliseconds, and so meet one mood of a shared machine. Read from
the other sizes of the same measurement, host copies of 0.5 to 25 MB were up to 17 % off with visits of 20 rounds and up to 12 % with four
of 5, in three measurements of two models each; all-gathers of a millisecond were worse by it."""

ISSUED = {"gpu", "hierarchical", "coalesced", "cpu", "publish", "internode", "reduce", "nvme", "publish_nvme"}
"""Operations that return before they are complete."""

TRANSPORTS = {"gpu", "hierarchical", "cpu", "publish", "internode", "reduce", "p2p", "nvme", "publish_nvme"}
"""Operations whose processor time is missing to compute, on machines without a device."""

CURVES = ("gpu", "hierarchical", "cpu", "publish", "internode", "reduce", "p2p", "optimizer", "flatten", "coalesced", "nvme", "publish_nvme")

Report = Callable[[int, int, str], None]
"""``report(done, total, what)``; called on rank 0 only."""


def sizes_of(name: str, options: Options) -> list[int]:
    """The grid of one curve. Sparse where the cost is known to be smooth."""
    low, high = options.min_bytes, options.max_bytes
    if name == "optimizer":
        sizes = grid.factor_2(low, max(options.max_rank_bytes or high, low), factor=4)
    elif options.sizes:
        sizes = list(options.sizes)
    elif name == "p2p":
        sizes = grid.factor_2(low, max(min(high, 16 * MIB), low))
    elif name == "coalesced":
        sizes = grid.factor_2(min(low * 4, high), high, factor=4)
    elif name == "flatten":
        sizes = grid.factor_2(low, high, factor=4)
    else:
        sizes = grid.factor_2(max(low, min(SMALL_BYTES, high)), high)
        if low < sizes[0]:
            sizes = [low, *sizes]  # below, a call takes what it takes, whatever the bytes
        sizes = grid.beside_powers(sizes)
    if name in GATHERS:
        sizes = [*sizes, *options.also_sizes]
    return sorted({options.rounded(size) for size in sizes})


def run(fabric: Fabric, report: Report) -> dict | None:
    """Measure everything that the options ask for; the result on rank 0, None elsewhere."""
    options = fabric.options
    runners = processors.runners_of(fabric) if "compute" in options.links else {}
    names = [name for name in CURVES if name in OPERATIONS and name in options.links and not _missing(name, fabric)]
    operations = {name: OPERATIONS[name](fabric) for name in names}
    drive = None
    if options.nvme_path is not None and "nvme" in options.links:
        if fabric.rank == 0:
            report(0, 1, "nvme: block size, queue depth")
        operations["nvme"] = nvme.NvmeRead(fabric)
        operations["publish_nvme"] = nvme.NvmeWrite(operations["nvme"])
        names += ["nvme", "publish_nvme"]
        drive = nvme.sweep(fabric, operations["nvme"], options.seconds * SWEEP_SHARE)
    grid_visits = [(name, size) for name in names for size in sizes_of(name, options)]
    visits = [shuffled(grid_visits, number) for number in range(PASSES)]
    pairs = contention.pairs(fabric) if "contention" in options.links else []
    contention_seconds = options.seconds * CONTENTION_SHARE if pairs else 0.0
    # Measured alone it has all of the time.
    compute_seconds = options.seconds * (COMPUTE_SHARE if names or pairs else 1.0) if "compute" in options.links else 0.0
    total = sum(map(len, visits)) + len(pairs)
    done, merged, refined, short = 0, {}, set(), set()

    def weight(visit: tuple[str, int]) -> float:
        return _weight(visit[1]) / (SHORT_VISITS if visit in short else 1)

    uncharged = Uncharged(fabric, options.seconds * QUIET_SHARE)
    turns = None
    if compute_seconds:
        turns = processors.Turns(fabric, runners, compute_seconds, PASSES, lambda what: report(done, total, what) if fabric.rank == 0 else None)
    # From here: what making a large model takes must not be taken from the curves.
    curves_seconds = options.seconds - contention_seconds - compute_seconds - (options.seconds * SWEEP_SHARE if drive else 0.0)
    curves_end, taken = monotonic() + curves_seconds, 0
    for number in range(MAX_PASSES):
        if number == 1:
            medians = _medians(merged)
            finer = grid_visits if options.sizes else _refined(fabric, grid_visits, medians)
            refined, short = {*finer} - {*grid_visits}, {visit for visit, us in medians.items() if visit[0] == "cpu" and us < SHORT_US}
            finer = [visit for visit in finer for _ in range(SHORT_VISITS if visit in short else 1)]
            visits[1:] = [shuffled(finer, later) for later in range(1, PASSES)]
            total = sum(map(len, visits)) + len(pairs)
        if number >= PASSES:
            if fabric.agree(int(curves_end < monotonic())):
                break
            visits.append(shuffled(visits[-1], number))
            total += len(visits[-1])
        own: dict[tuple[str, int], Samples] = {}
        for position, (name, size) in enumerate(visits[number]):
            if fabric.rank == 0:
                report(done, total, f"{name} {_text(size)}")
            left = curves_end - monotonic()
            if number and fabric.agree(int(left < 0)):
                break  # every size has been visited once; the table says so
            still = sum(weight(visit) for later in (visits[number][position:], *visits[number + 1 :]) for visit in later)
            often = SHORT_VISITS if number and (name, size) in short else 1
            seconds = max(left, 0.0) * weight((name, size)) / still
            found = uncharged.watch(name, size, lambda: sample(fabric, operations[name], size, seconds, max_rounds=MAX_ROUNDS // often))
            own.setdefault((name, size), Samples()).add(found)
            done += 1
        _merge(fabric, own, merged)
        if turns is not None:
            begin = monotonic()
            due = fabric.agree(parts_due(1.0 - (curves_end - begin) / curves_seconds if curves_seconds > 0 else 1.0))
            for part in range(taken, due):
                turns.take(part)
            curves_end, taken = curves_end + monotonic() - begin, max(taken, due)
    if turns is not None:
        for part in range(taken, PASSES):
            turns.take(part)

    def beside(pair: tuple[str, str]) -> None:
        report(done + pairs.index(pair), total, f"{pair[0]} beside {pair[1]}")

    rows = contention.run(fabric, pairs, contention_seconds, beside)
    for operation in operations.values():
        operation.close()
    done += len(pairs)
    compute = turns.result() if turns is not None else {}
    us_per_byte = uncharged.us_per_byte(processors.kernel_of(fabric))
    if fabric.rank != 0:
        return None
    known = {(row["measured"], row["busy"]) for row in rows}
    return {
        "curves": _curves(merged, refined, us_per_byte),
        "contention": rows,
        "unmeasured_pairs": [pair for pair in pairs if pair not in known],
        "compute": compute,
        "nvme": drive,
    }


def parts_due(used: float) -> int:
    """How many of the :data:`PASSES` parts of compute belong before the moment when this share of the curves' time
    is used: the first behind the first pass, the others as far apart as the time allows."""
    return min(PASSES, 1 + int(used * (PASSES - 1)))


def shuffled(visits: list, number: int) -> list:
    """Pass ``number`` in an order of its own, the same on all ranks: what a gather costs depends on what
    went before it, and no size may always come behind the same."""
    return random.Random(number).sample(visits, len(visits))


def _weight(size: int) -> float:
    """Share of the time that a size gets: a round of a large one takes longer."""
    return 1.0 + min(size / (4 * MIB), 8.0)


def _missing(name: str, fabric: Fabric) -> bool:
    """Whether the run has no such link."""
    return {"p2p": fabric.pipe is None, "internode": fabric.options.nodes < 2, "hierarchical": not fabric.options.has_hierarchy}.get(name, False)


def _text(size: int) -> str:
    for unit, name in ((1 << 20, "MiB"), (1 << 10, "KiB")):
        if size >= unit:
            return f"{size / unit:.4g} {name}"
    return f"{size} B"


def _merge(fabric: Fabric, own: dict, merged: dict) -> None:
    """Add a pass: ``merged[name, size]`` is a list over passes of (us that count, see ends.py, in each round,
    issued of all ranks, processor time of all ranks)."""
    everyone: list = [None] * fabric.world_size
    dist.all_gather_object(everyone, {key: (value.us, value.issued_us, value.processor_us) for key, value in own.items()})
    sets = {name: sets_of_ranks(name, fabric.options) for name, _ in own}
    for key in own:
        rounds = until_last(sets[key[0]], [theirs[key][0] for theirs in everyone])
        ranks = [rank for together in sets[key[0]] for rank in together]
        issued, used = ([value for rank in ranks for value in everyone[rank][key][which]] for which in (1, 2))
        merged.setdefault(key, []).append((rounds, issued, used))


def _medians(merged: dict) -> dict[tuple[str, int], float]:
    """Of the first pass, by name and size; the same on all ranks."""
    return {visit: median(us for us_of_ranks in passes[0][0] for us in us_of_ranks) for visit, passes in merged.items()}


def _refined(fabric: Fabric, visits: list, medians: dict) -> list:
    """A pass behind the first: also sizes between neighbours that disagree, gathers and copies only."""
    added = []
    for name in ("gpu", "cpu"):
        curve = {size: us for (own, size), us in medians.items() if own == name}
        added += [(name, fabric.options.rounded(size)) for size in grid.refinement(curve)]
    # All ranks hold the same samples and the list is sorted: they agree without asking.
    return sorted({*visits, *added}, key=lambda visit: (CURVES.index(visit[0]), visit[1]))


def _curves(merged: dict, refined: set, uncharged: dict[str, float]) -> dict[str, list[dict]]:
    """Medians and 95th percentiles, by name then size; what a table is made of. ``uncharged``: by name, processor
    time of a byte that no rank is charged with, in microseconds."""
    curves: dict[str, list[dict]] = {}
    for (name, size), passes in sorted(merged.items()):
        rounds = [us_of_ranks for times, _, _ in passes for us_of_ranks in times]
        us = sorted(value for us_of_ranks in rounds for value in us_of_ranks)
        point = {
            "size_bytes": size,
            "p50_us": median(us),
            "p95_us": us[min(int(len(us) * 0.95), len(us) - 1)],
            "samples": len(us),
            "medians_us": _medians_of_quarters(rounds),
            "passes": len(passes),
        }
        if (name, size) in refined:
            point["refined"] = True
        if name in ISSUED:
            point["issued_us"] = median(value for _, issued, _ in passes for value in issued)
        used = median(value for _, _, used in passes for value in used)
        if name in TRANSPORTS and used > 0:
            point["processor_us"] = used + size * uncharged.get(name, 0.0)
        curves.setdefault(name, []).append(point)
    return curves


def _medians_of_quarters(rounds: list[tuple[float, ...]]) -> list[float]:
    """Medians over all ranks of the rounds of each quarter, in the order of time."""
    parts = min(QUARTERS, len(rounds))
    cuts = [len(rounds) * part // parts for part in range(parts + 1)]
    return [median(us for us_of_ranks in rounds[start:end] for us in us_of_ranks) for start, end in zip(cuts, cuts[1:])]
