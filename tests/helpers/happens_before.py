"""What nothing orders, and what would wait in a circle: vector clocks over what the ranks of a run have asked for.

Every thread and every stream of every rank is a timeline. A log holds what threads did, in their order; what a thread
gives to a stream is queued there. An access is ``(key, begin, end, writes)``: bytes of one block. Two accesses of
different timelines to the same bytes, at least one of which writes, must be ordered by tokens (events, queues,
handles), flags, or collectives. When each was really done does not matter.
Source: Flanagan and Freund, "FastTrack", PLDI 2009 (epochs).

[Note: Circles]
A synchronous call holds the driver's lock until a stream is done. The flags that the stream needs are in its clock,
what the calling thread knows to have happened is in its own. A flag that a thread stores between the two, and any call
of the driver by a thread of this rank before that store, may have to come while the lock is held: with unlucky timing
nobody goes on. If the call keeps the interpreter's lock too, the store alone is enough. So a circle is seen although
the run has got through.
"""

from collections import Counter, defaultdict, deque
from typing import NamedTuple

OUT, IN, STORE, WAIT, COLLECTIVE, ACCESS, ISSUE = "out", "in", "store", "wait", "collective", "access", "issue"
CALL, SYNC = "call", "sync"


class Circle(NamedTuple):
    """A synchronous call, and what another thread of the rank has to do before it ends; stacks are numbers."""

    rank: int
    holder: str
    call: str
    stack: int
    other: str
    needs: str
    other_stack: int | None


class HappensBefore:
    """Judges the logs of all ranks; entries are ``(timeline, kind, ...)``, see :meth:`_step`.

    Attributes:
        races: ``(label, label)`` of pairs that nothing orders.
        circles: see the note above; one for each thread that waits and call that it waits for.
        stuck: what never happened, by timeline.
        crossed: collectives that ranks issue in different orders, if any: each of their kernels may hold a device, or
            its one hardware queue, and wait for the other.
    """

    def __init__(self, logs: list[list[tuple]]):
        self.races: set[tuple[str, str]] = set()
        self.accesses = 0
        self._circles: dict[tuple, Circle] = {}
        self._clock: dict = defaultdict(dict)
        self._tokens: dict = {}
        self._flags: dict = defaultdict(list)
        self._joined: dict = defaultdict(dict)
        self._memory: dict = defaultdict(dict)
        self._queues: dict = defaultdict(deque)
        self._calls: dict = defaultdict(list)  # of the driver, by thread: (epoch, label, stack)
        self._stores: dict = defaultdict(list)  # of flags that streams wait for, by thread
        self._awaited: set = set()  # flags that streams wait for
        self.crossed = _crossed([[*_collectives(log)] for log in logs])
        for number, log in enumerate(logs):
            for index, (timeline, kind, *rest) in enumerate(log):
                if kind == ISSUE:  # in the order in which threads gave it to the stream
                    stream, *entries = rest
                    token = ("issued", number, index)
                    self._queues[stream].extend([(IN, token), *entries])
                    self._awaited.update(entry[1] for entry in entries if entry[0] == WAIT)
                    kind, rest = OUT, [token]
                self._queues[timeline].append((kind, *rest))
        moved = True
        while moved:
            moved = False
            for timeline in list(self._queues):
                queue = self._queues[timeline]
                while queue and self._step(timeline, queue[0]):
                    queue.popleft()
                    moved = True
        self.stuck = {str(timeline): str(queue[0]) for timeline, queue in self._queues.items() if queue}

    @property
    def circles(self) -> list[Circle]:
        sure = {pair[:3] for pair in self._circles if pair[3]}
        return [circle for pair, circle in self._circles.items() if pair[3] or pair[:3] not in sure]

    def _join(self, timeline, other: dict) -> None:
        clock = self._clock[timeline]
        for key, value in other.items():
            if clock.get(key, 0) < value:
                clock[key] = value

    def _leave(self, timeline) -> dict:
        """The clock as it is; what comes next is later."""
        clock = self._clock[timeline]
        clock[timeline] = clock.get(timeline, 0) + 1
        return dict(clock)

    def _step(self, timeline, entry: tuple) -> bool:
        """Do the next entry of ``timeline``; False while it has to wait for others."""
        kind, *rest = entry
        if kind == OUT:
            self._tokens[rest[0]] = self._leave(timeline)
        elif kind == IN:
            if rest[0] not in self._tokens:
                return False
            self._join(timeline, self._tokens[rest[0]])
        elif kind == STORE:
            epoch, clock = self._epoch(timeline), self._leave(timeline)
            if "thread" in timeline[1] and rest[0] in self._awaited:
                self._stores[timeline].append((epoch, f"the store of flag {rest[0]}", clock))
            self._flags[rest[0]].append((rest[1], clock))
        elif kind == WAIT:
            stores = [(0, {}), *self._flags[rest[0]]]  # flags are 0 at first
            clock = next((clock for value, clock in stores if value >= rest[1]), None)
            if clock is None:
                return False
            self._join(timeline, clock)
        elif kind == COLLECTIVE:
            name, rank, size, *sources = rest  # whose data this rank gets, where not of all
            joined = self._joined[name]
            if rank not in joined:
                joined[rank] = self._leave(timeline)
            if len(joined) < size if not sources else sources[0] not in joined:
                return False
            for clock in joined.values() if not sources else [joined[sources[0]]]:
                self._join(timeline, clock)
        elif kind == CALL:
            self._calls[timeline].append((self._epoch(timeline), *rest))
        elif kind == SYNC:
            return self._synchronize(timeline, *rest)
        else:
            self._access(timeline, *rest)
        return True

    def _epoch(self, timeline) -> int:
        """Who knows of what is done now has at least this in its clock."""
        return self._clock[timeline].get(timeline, 0) + 1

    def _synchronize(self, timeline, tokens, label: str, stack: int, keeps_interpreter: bool, joins: bool) -> bool:
        if not all(token in self._tokens for token in tokens):
            return False
        needed: dict = {}
        for token in tokens:
            for key, value in self._tokens[token].items():
                needed[key] = max(needed.get(key, 0), value)
        known = self._clock[timeline]
        for thread, stores in self._stores.items():
            for epoch, store, clock in reversed(stores):
                if epoch <= known.get(thread, 0):
                    break
                if epoch <= needed.get(thread, 0):
                    found = [*self._calls_between(timeline, known, clock)]
                    if keeps_interpreter and thread[0] == timeline[0]:
                        found.append((thread, store, None))
                    for other, needs, other_stack in found:
                        circle = Circle(timeline[0], timeline[1], label, stack, other[1], needs, other_stack)
                        # A call that is sure to wait, and one that may, are told apart.
                        self._circles.setdefault((timeline, other, needs, joins), circle)
        if joins:
            self._join(timeline, needed)
        return True

    def _calls_between(self, timeline, known: dict, clock: dict):
        """Of the driver, by other threads of the rank: not known to ``timeline``, and before ``clock``."""
        for other, calls in self._calls.items():
            if other != timeline and other[0] == timeline[0]:
                for epoch, needs, stack in reversed(calls):
                    if epoch <= known.get(other, 0):
                        break
                    if epoch <= clock.get(other, 0):
                        yield other, needs, stack

    def _access(self, timeline, label: str, accesses) -> None:
        clock, epoch = self._clock[timeline], self._epoch(timeline)
        for key, begin, end, writes in accesses:
            self.accesses += 1
            known = self._memory[key]
            for (other, first, last, wrote), (when, said) in known.items():
                conflict = other != timeline and (writes or wrote) and first < end and begin < last
                if conflict and clock.get(other, 0) < when:
                    self.races.add((said, label))
            known[timeline, begin, end, writes] = (epoch, label)


def _collectives(log: list[tuple]):
    """Names of the collectives of a rank, in the order in which it issues them."""
    for _, kind, *rest in log:
        entries = rest[1:] if kind == ISSUE else [(kind, *rest)]
        yield from (entry[1] for entry in entries if entry[0] == COLLECTIVE)


def _crossed(orders: list[list]) -> list:
    """What is left where nothing more is first on all ranks that take part."""
    queues, behind = [deque(order) for order in orders], Counter(name for order in orders for name in order)
    while any(queues):
        heads = Counter(queue[0] for queue in queues if queue)
        free = {head for head, ranks in heads.items() if ranks == behind[head]}
        if not free:
            return sorted(heads)
        for queue in queues:
            if queue and queue[0] in free:
                queue.popleft()
    return []


def said(circle: Circle, stacks: list[str]) -> str:
    """A circle in words, with both stacks."""
    text = f"circle: {circle.holder} holds the driver's lock in {circle.call} until a stream is done,"
    text += (
        f"\n{stacks[circle.stack]}\n  before which {circle.other} needs this lock, or the interpreter's: {circle.needs}"
    )
    return text if circle.other_stack is None else f"{text}\n{stacks[circle.other_stack]}"
