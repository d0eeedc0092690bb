"""A measured trace, iteration by iteration: the training thread's time, and what ran when.

[Note: What belongs to an iteration]
Events of a training thread carry the number of the iteration in which they were recorded. Events
after its optimizer step (evaluation, a checkpoint, the last gather before the end) carry the same
number but are not training, so they are told apart by time. The lanes of links are recorded by
other threads, for which the number may change during an event, so they are placed by time alone.
"""

from collections import defaultdict
from collections.abc import Iterable
from statistics import median
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from megatron_ext.formats import trace as traces
from megatron_ext.formats.checks import Checker
from megatron_ext.formats.moved_bytes import MovedBytes
from megatron_ext.formats.trace import Event
from megatron_ext.simulator.thread_path import LAUNCHES
from megatron_ext.workload.parallel import Parallel
from megatron_ext.workload.step_order import steps_of_ranks

AT_ONCE_US = 2e3
"""A training thread that waits for a full queue of launches is further ahead of its device than this: by 1,024 launches
of 4 us or more."""

THREAD_LANES = ("compute", *traces.WAITS, "issue", "optimizer")
"""Lanes of the training thread; every other lane is a link's."""


class Window(NamedTuple):
    """One iteration of all ranks, from fresh parameters to the end of the optimizer step.

    Times of ``events`` are microseconds after the first rank had fresh parameters. ``end_us``
    is the end of the last optimizer step. Compute events have the names of their steps.
    """

    iteration: int
    events: list[Event]
    end_us: float


class MeasuredTrace:
    """A trace that a training run wrote.

    Args:
        path: the file.
        parallel: parallel sizes of the run.
        iterations: the number of training iterations that the trace must have; None accepts any number.
        ramp: smaller numbers of micro-batches that iterations may have, while the batch grows.

    Attributes:
        about: what the run says about itself.
        unlike: the iterations with fewer micro-batches, or a skipped update.
        moved_bytes: by rank and iteration, the counted bytes; empty if none were counted.

    Raises:
        InputError: it is not a measured trace, has other ranks or iterations, or has steps in another order.
    """

    def __init__(self, path, parallel: Parallel, iterations: int | None = None, ramp: tuple[int, ...] = ()):
        events, about = traces.load(path)
        check = Checker(path)
        if iterations is None:
            iterations = max((event.iteration for event in events if event.lane == "optimizer"), default=0)
        self.path, self.parallel, self.iterations = path, parallel, iterations
        if about.get("kind") != "measured":
            check.refuse("expected the trace of a training run", "otherData.kind", about.get("kind"))
        try:
            self.about = msgspec.convert(about, traces.AboutTraining)
        except msgspec.ValidationError as error:
            check.refuse(str(error), "otherData")
        self.moved_bytes = _moved_bytes(self.about.moved_bytes, parallel.world_size, iterations, check)
        by_rank: dict[int, list[Event]] = defaultdict(list)
        for event in events:
            by_rank[event.rank].append(event)
        if sorted(by_rank) != list(range(parallel.world_size)):
            check.refuse(f"expected the ranks 0 to {parallel.world_size - 1}", "traceEvents", sorted(by_rank))
        self._ranks = {rank: _RankTrace(mine, iterations, check) for rank, mine in by_rank.items()}
        orders = [steps_of_ranks(replace(parallel, num_microbatches=n)) for n in (*ramp, parallel.num_microbatches)]
        for rank, trace in self._ranks.items():
            trace.name_steps([order[rank // (parallel.world_size // parallel.pp)] for order in orders])
        self.unlike = set().union(*(trace.unlike for trace in self._ranks.values()))

    def thread_us(self, lanes: tuple[str, ...]) -> list[float]:
        """Per iteration: microseconds of a training thread in ``lanes``, largest over ranks."""
        return [
            max(sum(e.duration_us for e in trace.thread[i] if e.lane in lanes) for trace in self._ranks.values())
            for i in range(1, self.iterations + 1)
        ]

    def launches(self, indices: Iterable[int]) -> tuple[float, bool] | None:
        """(the time of the slowest thread until it had issued its last step, as a median over the iterations
        ``indices``; whether all devices had finished that step by then). None if that is not recorded."""
        found = [[(t.launches[i + 1], t.optimizer[i + 1]) for t in self._ranks.values() if t.launches] for i in indices]
        if not all(found):
            return None
        behind = median(max(step.start_us - own.end_us for own, step in ranks) for ranks in found)
        return median(max(own.duration_us for own, _ in ranks) for ranks in found), behind < AT_ONCE_US

    def periods_us(self) -> dict[int, float]:
        """By iteration: microseconds since the end of the previous iteration. That includes the pause in
        which ranks log and synchronize. Iterations after an evaluation are left out."""
        ends = {i: max(trace.end_us(i) for trace in self._ranks.values()) for i in range(1, self.iterations + 1)}
        return {i: ends[i] - ends[i - 1] for i in range(2, self.iterations + 1) if not self.evaluated_before(i)}

    def evaluated_before(self, iteration: int) -> bool:
        """Whether steps that are not training ran between the previous iteration and ``iteration``."""
        return any(trace.outside[iteration - 1] for trace in self._ranks.values())

    def iteration_us(self, iteration: int) -> float:
        """From the start of a node's first step to the end of its last optimizer step: the longest over nodes, whose
        clocks are not compared."""
        nodes: dict[int, list[tuple[float, float]]] = defaultdict(list)
        for rank, trace in self._ranks.items():
            start = next(event.start_us for event in trace.thread[iteration] if event.lane == "compute")
            nodes[rank // self.parallel.node_size].append((start, trace.end_us(iteration)))
        return max(max(end for _, end in spans) - min(start for start, _ in spans) for spans in nodes.values())

    def window(self, iteration: int) -> Window:
        """Everything that ran for one iteration; see :class:`Window`."""
        spans = {
            rank: (trace.fresh_us(iteration - 1), trace.fresh_us(iteration)) for rank, trace in self._ranks.items()
        }
        zero = min(start for start, _ in spans.values())
        events = []
        for rank, (start, end) in spans.items():
            own = self._ranks[rank]  # its thread's events leave out steps outside of training
            near = (*own.thread[iteration - 1], *own.thread[iteration], *own.links)
            events += [e._replace(start_us=e.start_us - zero) for e in near if start <= e.start_us < end]
        end = max(trace.end_us(iteration) for trace in self._ranks.values())
        return Window(iteration, sorted(events, key=lambda e: (e.rank, e.start_us)), end - zero)


def _moved_bytes(found: list[list[MovedBytes]], ranks: int, iterations: int, check: Checker) -> list[list[MovedBytes]]:
    if not any(found):  # not scheduled, or not counted
        return []
    if [len(own) for own in found] != [iterations] * ranks:
        check.refuse(f"expected {iterations} iterations of {ranks} ranks", "otherData.moved_bytes", [*map(len, found)])
    return found


class _RankTrace:
    """Events of one global rank. ``thread[i]``: those of the training thread in iteration ``i``.
    ``outside[i]``: whether it computed between its optimizer step and the next iteration. ``unlike``: as for the
    whole trace."""

    def __init__(self, events: list[Event], iterations: int, check: Checker):
        self.iterations, self.check = iterations, check
        events.sort(key=lambda e: e.start_us)
        self.rank = events[0].rank
        self.first_us = events[0].start_us
        self.links = [e for e in events if e.lane not in (*THREAD_LANES, LAUNCHES)]
        self.launches = {event.iteration: event for event in events if event.lane == LAUNCHES}
        self.optimizer: dict[int, Event] = {}
        for event in events:
            if event.lane == "optimizer":
                if event.iteration in self.optimizer:
                    self._refuse("more than one optimizer step", event.iteration)
                self.optimizer[event.iteration] = event
        if set(self.optimizer) != set(range(1, iterations + 1)):
            held = f"{min(self.optimizer)} to {max(self.optimizer)}" if self.optimizer else "none"
            check.refuse(f"rank {self.rank} has iterations {held}, expected 1 to {iterations}", "traceEvents.iteration")
        self.unlike = {iteration for iteration, event in self.optimizer.items() if event.name == "skipped step"}
        self.thread: dict[int, list[Event]] = defaultdict(list)
        self.issued: dict[int, float] = {}
        self.outside: dict[int, bool] = defaultdict(bool)
        for event in events:
            if event.lane not in THREAD_LANES:
                continue
            step = self.optimizer.get(event.iteration)
            if step is not None and event.start_us > step.end_us:
                self.outside[event.iteration] |= event.lane == "compute"
                continue
            self.thread[event.iteration].append(event)
            if event.lane == "issue" and step is not None and event.start_us >= step.start_us:
                self.issued.setdefault(event.iteration, event.start_us)

    def _refuse(self, message: str, iteration: int):
        self.check.refuse(f"{message} in iteration {iteration} of rank {self.rank}", "traceEvents")

    def name_steps(self, orders) -> None:
        """Give the compute events, which ran in Megatron's order, the names of their steps. ``orders``: for each number
        of micro-batches, the steps; the last is that of the schedule."""
        by_kinds = {tuple(step.kind for step in steps): steps for steps in orders}
        for iteration in range(1, self.iterations + 1):
            thread = self.thread[iteration]
            places = [index for index, event in enumerate(thread) if event.lane == "compute"]
            steps = by_kinds.get(tuple(thread[index].name for index in places))
            if steps is None:
                self._refuse("the forwards and backwards are not those of the workload", iteration)
            self.unlike |= set() if steps is orders[-1] else {iteration}
            for index, step in zip(places, steps):
                thread[index] = thread[index]._replace(name=str(step))

    def end_us(self, iteration: int) -> float:
        """The end of this rank's optimizer step."""
        return self.optimizer[iteration].end_us

    def fresh_us(self, iteration: int) -> float:
        """The time at which this rank had the parameters that ``iteration`` made: its first issue within the
        optimizer step, or the end of that step. For iteration 0, the start of the trace."""
        if iteration in self.issued:
            return self.issued[iteration]
        return self.end_us(iteration) if iteration in self.optimizer else self.first_us
