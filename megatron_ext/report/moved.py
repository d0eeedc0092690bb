"""Bytes that each rank moves in an iteration: as billed, beside what the run has counted."""

from collections.abc import Sequence
from statistics import median_low
from typing import NamedTuple

from megatron_ext.formats.moved_bytes import KINDS, LINKS, MovedBytes, by_link, differences
from megatron_ext.schedule.byte_bill import byte_bill
from megatron_ext.schedule.user_defined_schedule import Schedule
from megatron_ext.workload.workload import Workload

MOST_LINES = 6
"""Differences that are said one by one."""


class Moved(NamedTuple):
    """Of one global rank, in an iteration."""

    rank: int
    planned: MovedBytes
    counted: MovedBytes


def moved(
    schedule: Schedule, workload: Workload, counts: Sequence[Sequence[MovedBytes]], indices: list[int]
) -> list[Moved]:
    """By global rank; empty where nothing was counted.

    Args:
        counts: by global rank and iteration.
        indices: of the iterations that figures are of. Each of them moves the same; one before which something was
            gathered beside the schedule (an evaluation, a checkpoint) more, so medians are taken.
    """
    bills, found = byte_bill(schedule, workload), []
    ranks = len(bills[0]) * workload.parallel.tensor_model_parallel_size  # of one pipeline rank, next to each other
    for rank, own in enumerate(counts):
        planned = bills[rank // ranks][rank % ranks // workload.parallel.tensor_model_parallel_size]
        chosen = [own[index] for index in indices]
        counted = {kind: {link: size for link in LINKS if (size := _median(chosen, kind, link))} for kind in KINDS}
        found.append(Moved(rank, planned, {kind: links for kind, links in counted.items() if links}))
    return found


def _median(chosen: list[MovedBytes], kind, link) -> int:
    return median_low(one.get(kind, {}).get(link, 0) for one in chosen)


def as_json(found: list[Moved]) -> list[dict]:
    """By rank both figures, and where they differ."""
    return [
        {
            **one._asdict(),
            "differences": [
                {"kind": kind, "link": link, "planned": planned, "counted": counted}
                for kind, link, planned, counted in differences(one.planned, one.counted)
            ],
        }
        for one in found
    ]


def rows(found: list[Moved]) -> list[tuple[str, str, str, str]]:
    """``(what, planned, counted, planned / counted)`` of the rank that moves most, with a head; empty where nothing was
    counted."""
    if not found:
        return []
    most = max(found, key=lambda one: sum(by_link(one.counted).values()))
    lines = [(f"bytes moved in an iteration, rank {most.rank}", "planned", "counted", "")]
    both = [{(kind, link): size for kind, own in m.items() for link, size in own.items()} for m in most[1:]]
    totals = [{("all", link): size for link, size in by_link(m).items()} for m in most[1:]]
    for planned, counted in (both, totals):
        keys = [(kind, link) for kind in (*KINDS, "all") for link in LINKS if (kind, link) in planned | counted]
        for kind, link in keys:
            sizes = [one.get((kind, link), 0) for one in (planned, counted)]
            ratio = f"{sizes[0] / sizes[1]:.3f}" if sizes[1] else ""
            what = f"  {kind}, {link}".replace("_", " ")
            lines.append((f"{what}, MB", *(f"{size / 1e6:.3f}" for size in sizes), ratio))
    return lines


def lines(found: list[Moved]) -> list[str]:
    """What was not moved as planned, by rank and kind."""
    unlike = [(one.rank, *difference) for one in found for difference in differences(one.planned, one.counted)]
    said = [
        f"rank {rank}: {kind}, {link.replace('_', ' ')}: planned {planned}, counted {counted} bytes an iteration"
        for rank, kind, link, planned, counted in unlike
    ]
    if len(said) > MOST_LINES:
        said[MOST_LINES - 1 :] = [f"and {len(said) - MOST_LINES + 1} more, see --json"]
    return said or ["each rank has moved what was planned, by kind and link"] * bool(found)
