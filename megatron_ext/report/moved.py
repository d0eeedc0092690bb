"""Bytes that each rank moves in an iteration: as billed, next to the bytes that the run has counted."""

from collections.abc import Sequence
from statistics import median_low
from typing import NamedTuple

from megatron_ext.formats.moved_bytes import KINDS, LINKS, Kind, Link, MovedBytes, by_link, byte_differences
from megatron_ext.schedule.byte_bill import byte_bill
from megatron_ext.schedule.user_defined_schedule import Schedule
from megatron_ext.workload.workload import Workload

MOST_LINES = 6
"""The most differences that are listed one by one."""


class Moved(NamedTuple):
    """The bytes of one global rank in an iteration."""

    rank: int
    planned: MovedBytes
    counted: MovedBytes


def moved(
    schedule: Schedule, workload: Workload, counts: Sequence[Sequence[MovedBytes]], indices: list[int]
) -> list[Moved]:
    """The moved bytes by global rank; empty if nothing was counted.

    Args:
        counts: by global rank and iteration.
        indices: the iterations that count. All of them move the same bytes, except that an iteration after a gather
            outside the schedule (an evaluation, a checkpoint) moves more. So medians are taken.
    """
    bills, found = byte_bill(schedule, workload), []
    ranks, instances = workload.parallel.of_instance, workload.parallel.instances
    for rank, own in enumerate(counts):
        planned = bills[rank // ranks // instances][rank % ranks * len(bills[0]) // ranks]
        chosen = [own[index] for index in indices]
        counted: MovedBytes = {kind: links for kind in KINDS if (links := _medians(chosen, kind))}
        found.append(Moved(rank, planned, counted))
    return found


def _medians(chosen: list[MovedBytes], kind: Kind) -> dict[Link, int]:
    of_links: dict[Link, int] = {link: median_low(one.get(kind, {}).get(link, 0) for one in chosen) for link in LINKS}
    return {link: size for link, size in of_links.items() if size}


def as_json(found: list[Moved]) -> list[dict]:
    """Both figures of each rank, and the places where they differ."""
    names = ("kind", "link", "planned", "counted")
    return [
        {**one._asdict(), "differences": [dict(zip(names, row)) for row in byte_differences(one.planned, one.counted)]}
        for one in found
    ]


def rows(found: list[Moved]) -> list[tuple[str, str, str, str]]:
    """Rows ``(what, planned, counted, planned / counted)`` of the rank that moves the most, with a head; empty if
    nothing was counted."""
    if not found:
        return []
    most = max(found, key=lambda one: sum(by_link(one.counted).values()))
    lines = [(f"bytes moved in an iteration, rank {most.rank}", "planned", "counted", "")]
    kinds = [(kind, most.planned.get(kind, {}), most.counted.get(kind, {})) for kind in KINDS]
    for kind, *both in (*kinds, ("all", by_link(most.planned), by_link(most.counted))):
        for link in LINKS:
            planned, counted = (links.get(link, 0) for links in both)
            if planned or counted:
                what, ratio = f"  {kind}, {link}, MB".replace("_", " "), f"{planned / counted:.3f}" if counted else ""
                lines.append((what, f"{planned / 1e6:.3f}", f"{counted / 1e6:.3f}", ratio))
    return lines


def lines(found: list[Moved]) -> list[str]:
    """Lines on bytes that were not moved as planned, by rank and kind."""
    unlike = [(one.rank, *difference) for one in found for difference in byte_differences(one.planned, one.counted)]
    said = [
        f"rank {rank}: {kind}, {link.replace('_', ' ')}: planned {planned}, counted {counted} bytes per iteration"
        for rank, kind, link, planned, counted in unlike
    ]
    if len(said) > MOST_LINES:
        said[MOST_LINES - 1 :] = [f"and {len(said) - MOST_LINES + 1} more, see --json"]
    if found and not said:
        said.append("every rank has moved the planned bytes, by kind and link")
    return said
