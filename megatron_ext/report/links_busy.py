"""The time in which each link of a rank carries bytes, the time in which all of them do so at once, and the share of
each kind of copy, and of the host's step, that was hidden behind compute.

[Note: When an all-gather moves bytes]
A trace has the times at which a rank issued an all-gather and at which it was complete. No byte moves before the last
rank of its group has issued it, so it counts from then. Ranks issue the same all-gathers in the same order. Earlier
collectives on its communicator are a part of its time, including reduces, which a run does not record. This holds in a
simulated trace as well.

[Note: What is hidden]
A rank's work on a link, or on the host, is hidden while one of its steps computes. Steps are forwards and backwards
without the time in which they wait for a group or a gradient.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from itertools import pairwise
from statistics import median
from typing import NamedTuple

from megatron_ext.formats.trace import END_NOT_KNOWN, WAITS, Event
from megatron_ext.schedule.user_defined_schedule import Group
from megatron_ext.workload.parallel import Parallel

LINKS = ("gpu", "cpu", "nvme")
"""Lanes of network, host link and drive."""

AT_ONCE = "all at once"

Intervals = list[tuple[float, float]]


def shares(events: Iterable[Event], end_us: float, begin_us: float = 0.0) -> dict[str, float]:
    """The shares of the time from ``begin_us`` to ``end_us`` in which each link carries the bytes of ``events``, which
    begin when they move (:func:`moving`). :data:`AT_ONCE`: in which all links that any rank uses do so. Means over
    ranks; empty if less than two links are used."""
    spans: dict[int, dict[str, Intervals]] = defaultdict(lambda: defaultdict(list))
    for event in events:
        begin, end = max(event.start_us, begin_us), min(event.end_us, end_us)
        if begin < end and event.lane in LINKS:
            spans[event.rank][event.lane].append((begin, end))
    used = [link for link in LINKS if any(link in own for own in spans.values())]
    if len(used) < 2:
        return {}
    found = dict.fromkeys((*used, AT_ONCE), 0.0)
    for rank in sorted(spans):
        links = [union(spans[rank][link]) for link in used]
        for name, intervals in zip(found, (*links, in_all(links))):
            found[name] += _length(intervals)
    return {name: us / len(spans) / (end_us - begin_us) for name, us in found.items()}


def moving(events: Iterable[Event], parallel: Parallel, groups: Sequence[Group] = ()) -> list[Event]:
    """The events whose end is known, the last first. For all-gathers see [Note: When an all-gather moves bytes].
    ``groups`` of the schedule give the ranks that gather together; without them these are the data-parallel ranks."""
    known = sorted((e for e in events if e.name != END_NOT_KNOWN), key=lambda e: e.start_us)
    of_instance = parallel.of_instance
    sets = {str(index): of_instance // group.ranks for index, group in enumerate(groups)}
    times, issued, found = Counter(), {}, []
    for event in reversed(known):  # the last rank to issue one comes first
        begin, end = event.start_us, event.end_us
        if event.lane == "gpu":
            times[event.rank, event.name] += 1
            own = event.rank % sets.get(event.name.rpartition(" ")[2], parallel.tensor_model_parallel_size)
            which = (event.rank // of_instance, own, event.name, times[event.rank, event.name])
            begin = min(issued.setdefault(which, begin), end)
        found.append(event._replace(start_us=begin, duration_us=end - begin))
    return found


def union(intervals: Iterable[tuple[float, float]]) -> Intervals:
    """The same time as intervals that do not touch, in order."""
    found: Intervals = []
    for begin, end in sorted(intervals):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((begin, end))
    return found


def in_all(lists: list[Intervals]) -> Intervals:
    """The time that is in each of ``lists``, whose intervals do not touch."""
    moments = sorted(moment for spans in lists for begin, end in spans for moment in ((begin, 1), (end, -1)))
    found, depth = [], 0
    for (begin, change), (end, _) in pairwise(moments):
        depth += change
        if depth == len(lists) and begin < end:
            found.append((begin, end))
    return found


STEP = "host's step"

NAMES = {
    "cpu": "copies to the device",
    "cpu parameters": "new parameters to the device",
    "gpu": "all-gathers",
    "host_add": "gradients added in host memory",
    "host_step": STEP,
    "nvme": "drive to staging slots",
    "nvme states": "optimizer states, drive",
    "publish": "publishing",
    "publish gradient": "gradients to the host",
    "publish parameters": "new parameters to the host",
    "reduce": "reduces",
}
"""The name of an event, by lane and first word of its name, or else by lane alone."""


class Hidden(NamedTuple):
    """``us``: the time of all intervals of one kind, mean over ranks. ``share``: the hidden share of it."""

    us: float
    share: float


def hidden(events: Iterable[Event]) -> dict[str, Hidden]:
    """The hidden work of each kind among ``events`` of :func:`moving`, by name in :data:`NAMES`."""
    spans: dict[str, dict[int, Intervals]] = defaultdict(lambda: defaultdict(list))
    for event in events:
        lane = "wait" if event.lane in WAITS else event.lane
        name = NAMES.get(f"{lane} {event.name.partition(' ')[0]}") or NAMES.get(lane, lane)
        spans[name][event.rank].append((event.start_us, event.end_us))
    compute, waits = spans.pop("compute", {}), spans.pop("wait", {})
    ranks, found = len({rank for own in (compute, *spans.values()) for rank in own}), {}
    for name in (name for name in NAMES.values() if name in spans):
        total = behind = 0.0
        for rank, intervals in spans[name].items():
            own, steps = union(intervals), union(compute.get(rank, []))
            waited = in_all([own, steps, union(waits.get(rank, []))])
            total += _length(own)
            behind += _length(in_all([own, steps])) - _length(waited)
        if total:
            found[name] = Hidden(total / ranks, behind / total)
    return found


def over_iterations(found: list[dict[str, Hidden]]) -> dict[str, Hidden]:
    """Medians over several iterations. A kind that is missing in one of them is left out."""
    names = [name for name in NAMES.values() if all(name in one for one in found)]
    return {name: Hidden(*(median(one[name][n] for one in found) for n in range(2))) for name in names}


def _length(intervals: Intervals) -> float:
    return sum(end - begin for begin, end in intervals)
