"""Which share of the host's step, and of each kind of copy, was hidden behind compute.

[Note: What is hidden]
A rank's work on a link, or on the host, is hidden as far as one of its steps computes meanwhile: forwards and
backwards without the time in which they wait for a group or a gradient. Of all-gathers see links_busy.py, [Note: When
an all-gather moves bytes].
"""

from collections import defaultdict
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

from megatron_ext.formats.trace import WAITS, Event
from megatron_ext.report.links_busy import Intervals, in_all, moving, union
from megatron_ext.schedule.user_defined_schedule import Group
from megatron_ext.workload.parallel import Parallel

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
"""What events are called, by lane and first word of their names; else by the lane alone."""


class Hidden(NamedTuple):
    """``us``: of all intervals of one kind, the mean over ranks; ``share``: of it, hidden."""

    us: float
    share: float


def hidden(events: Sequence[Event], parallel: Parallel, groups: Sequence[Group] = ()) -> dict[str, Hidden]:
    """By name of :data:`NAMES`."""
    spans: dict[str, dict[int, Intervals]] = defaultdict(lambda: defaultdict(list))
    for event in moving(events, parallel, groups):
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
    """Medians of several iterations. What is not in each of them is left out."""
    names = [name for name in NAMES.values() if all(name in one for one in found)]
    return {name: Hidden(*(median(one[name][n] for one in found) for n in range(2))) for name in names}


def _length(intervals: Intervals) -> float:
    return sum(end - begin for begin, end in intervals)
