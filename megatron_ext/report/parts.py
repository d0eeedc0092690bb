"""The time of every part of an iteration next to its prediction, and the part that explains the difference.

[Note: Parts]
A part is one kind of activity: forwards, backwards, or one lane of a trace. Its time is the sum of its durations on one
rank, where the parts of the training thread take the longest together. For a link it is the time in which it is busy,
the largest over ranks. This holds for a measured iteration and for the simulated one. Forwards, backwards, waits for
groups and for gradients, issuing and the optimizer run one after another on the training thread. On a device they run
on the compute stream, while the thread issues. The recorded time of a step includes its waits and its issuing, which
are subtracted. ``rest`` is the time of an iteration that is in none of these parts: the pipeline's bubble, and times
that no table has. The parts of links overlap the others: if waits for groups or the optimizer differ most, the link
that differs most is named as well. ``nvme`` includes stage-ins and optimizer states; ``host_step`` does not include
waits for these.

[Note: Launches]
On a device ``launches`` is the time of the training thread until it has issued the last step of an iteration. Without a
device, launches are a part of forwards and backwards. The run gives only an upper limit of it: the thread also waits
for the device when the queue of launches is full and when Megatron checks for NaN. If the device waits for the thread
in the prediction, and in the run the device has finished the steps when the thread has issued them, launches explain
the difference: the forwards and backwards on the device then include its waits for launches.
"""

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable
from functools import cache
from statistics import median
from typing import Any, NamedTuple

from megatron_ext.formats.trace import WAITS, Event, Lane
from megatron_ext.report.links_busy import Intervals, union
from megatron_ext.report.run_dir import RunDir
from megatron_ext.simulator.simulation import Result
from megatron_ext.simulator.thread_path import LAUNCHES, visits_us
from megatron_ext.simulator.timing import Timing

FORWARD, BACKWARD, REST, OPTIMIZER = "forward", "backward", "rest", "optimizer"
ON_THREAD = (FORWARD, BACKWARD, *WAITS, OPTIMIZER)
"""Parts that run one after another. Without a device, issuing is one of them as well."""
ISSUE: Lane = "issue"
BY_LINK = ("gpu", "cpu", "nvme", "publish", "p2p", "reduce", "host_step", "host_add")
PARTS = (*ON_THREAD, ISSUE, REST, *BY_LINK)


class TimePart(NamedTuple):
    """Microseconds of one part in one iteration. ``measured_us`` is None if the run does not record the part.
    ``limits``: for launches, whether the device waits for them in the prediction, and in the run has finished the steps
    when the last one has been issued."""

    name: str
    predicted_us: float
    measured_us: float | None
    limits: bool = False

    @property
    def difference_us(self) -> float:
        return 0.0 if self.measured_us is None else self.measured_us - self.predicted_us


def part_of(event: Event) -> str:
    """The part that an event belongs to. A compute event has the name of its step, such as ``3B0``."""
    if event.lane != "compute":
        return event.lane
    return BACKWARD if "B" in event.name else FORWARD


def apart(events: Iterable[Event], on_device: bool, by_optimizer: tuple[Lane, ...] = ()) -> list[Event]:
    """``events``, which begin when they move (:func:`megatron_ext.report.links_busy.moving`), with waits and issuing
    subtracted from steps and from the optimizer. The lanes ``by_optimizer`` are subtracted from the optimizer too. A
    link has one event for each interval in which it is busy."""
    steps, spans = [], defaultdict[tuple[int, Lane], Intervals](list)
    for event in events:
        if event.lane in ("compute", OPTIMIZER):
            steps.append(event)
        else:
            spans[event.rank, event.lane].append((event.start_us, event.end_us))
    thread: tuple[Lane, ...] = WAITS if on_device else (*WAITS, ISSUE)

    @cache
    def inside(rank: int, lane: Lane) -> tuple[Intervals, list[float]]:
        lanes = (*thread, *by_optimizer) if lane == OPTIMIZER else thread
        own = union(span for one in lanes for span in spans.get((rank, one), ()))
        return own, [end for _, end in own]

    def alone(event: Event) -> Event:
        begin, end, within = event.start_us, event.end_us, 0.0
        own, ends = inside(event.rank, event.lane)
        for place in range(bisect_right(ends, begin), len(own)):
            if own[place][0] >= end:
                break
            within += min(own[place][1], end) - max(own[place][0], begin)
        return event._replace(duration_us=event.duration_us - within)

    busy = [Event(*key, key[1], begin, end - begin) for key, own in spans.items() for begin, end in union(own)]
    return [*map(alone, steps), *busy]


def by_rank(events: Iterable[Event], on_device: bool) -> dict[int, Counter]:
    """By rank and part, the sum of its durations."""
    found: defaultdict[int, Any] = defaultdict(Counter)
    for event in apart(events, on_device):
        found[event.rank][part_of(event)] += event.duration_us
    return found


def parts(
    predicted: Iterable[Event],
    predicted_us: float,
    measured: Iterable[Iterable[Event]],
    measured_us: float,
    on_device: bool,
) -> tuple[TimePart, ...]:
    """The parts of the predicted iteration, which takes ``predicted_us``, next to medians over the measured iterations,
    whose median time is ``measured_us``. Parts that run one after another are of one rank, where they take the longest
    together in the run, so that they add up; links are the largest over ranks."""
    simulated, *runs = (by_rank(events, on_device) for events in (predicted, *measured))

    def thread_us(rank: int) -> float:
        return median(sum(ranks[rank][name] for name in ON_THREAD) for ranks in runs)

    slowest = max(sorted({rank for ranks in runs for rank in ranks}), key=thread_us, default=0)
    like = max((rank for rank in simulated if rank <= slowest), default=0)  # of its pipeline rank one rank is simulated

    def totals(ranks: dict[int, Counter], rank: int) -> dict[str, float]:
        names = {name for own in ranks.values() for name in own}
        return {n: max(own[n] for own in (ranks.values() if n in BY_LINK else (ranks[rank],))) for n in names}

    own, others = totals(simulated, like), [totals(ranks, slowest) for ranks in runs]
    path = ON_THREAD if on_device else (*ON_THREAD, ISSUE)
    seen = {name for found in others for name in found}
    found = {name: median(each.get(name, 0.0) for each in others) for name in seen}
    own[REST] = max(predicted_us - sum(own.get(name, 0.0) for name in path), 0.0)
    found[REST] = max(measured_us - sum(found.get(name, 0.0) for name in path), 0.0)
    return tuple(TimePart(name, own.get(name, 0.0), found.get(name)) for name in PARTS if name in own or name in found)


def launches(run: RunDir, predicted: Result, timing: Timing, indices: Iterable[int]) -> tuple[TimePart, ...]:
    """The part of [Note: Launches]; empty if the table has no launches, or the run did not record them."""
    thread_us = predicted.busy_us.get(LAUNCHES, 0.0)
    found = run.scheduled_trace.launches(indices) if run.on_device and thread_us else None
    limits = found is not None and found[1] and thread_us >= predicted.iteration_time_us
    return (TimePart(LAUNCHES, thread_us - visits_us(run.workload, timing), found[0], limits),) if found else ()


def explains(found: Iterable[TimePart], difference_us: float) -> tuple[TimePart, TimePart | None] | None:
    """The part that explains most of a difference (measured - predicted). If that part is a wait for groups or the
    optimizer, also the link that differs most with the same sign. None if no part differs with that sign."""
    sign = 1.0 if difference_us >= 0 else -1.0
    by_name = {part.name: part for part in found}

    def most(names: Iterable[str]) -> TimePart | None:
        known = [by_name[name] for name in names if name in by_name and sign * by_name[name].difference_us > 0]
        return max(known, key=lambda part: sign * part.difference_us, default=None)

    launched = by_name.get(LAUNCHES)
    part = most((*ON_THREAD, ISSUE, REST) if launched is None or not launched.limits else (LAUNCHES,))
    if part is None:
        return None
    return part, most(BY_LINK) if part.name in ("wait", OPTIMIZER) else None


def lines(found: Iterable[TimePart], difference_us: float) -> list[str]:
    """Text for people: one line per part, and the part that explains the difference."""
    rows = []
    for part in found:
        most = "at most " if part.name == LAUNCHES else ""
        measured = "not recorded" if part.measured_us is None else f"{most}{part.measured_us / 1e3:.3f} measured"
        rows.append(f"{part.name}: {part.predicted_us / 1e3:.3f} ms predicted, {measured}")
    cause = explains(found, difference_us)
    if cause is not None:
        part, link = cause
        share = min(part.difference_us / difference_us, 1.0) if difference_us else 1.0
        by = f", among the links mostly {link.name} ({link.difference_us / 1e3:+.3f} ms)" if link is not None else ""
        rows.append(
            f"{part.name} explains most of the difference of {difference_us / 1e3:+.3f} ms: "
            f"{part.difference_us / 1e3:+.3f} ms ({share:.0%}){by}"
        )
    return rows


def as_json(found: Iterable[TimePart], difference_us: float) -> dict:
    """``parts`` by name, and ``explains``: the name of the part that explains most, or None."""
    cause = explains(found, difference_us)
    by_name = {part.name: {"predicted_us": part.predicted_us, "measured_us": part.measured_us} for part in found}
    return {"parts": by_name, "explains": cause[0].name if cause is not None else None}
