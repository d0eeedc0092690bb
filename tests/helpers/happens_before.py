"""Which accesses to memory nothing orders: vector clocks over what the ranks of a run have asked for.

Every thread and every stream of every rank is a timeline. A log holds what threads did, in their order; what a thread
gives to a stream is queued there. An access is ``(key, begin, end, writes)``: bytes of one block. Two accesses of
different timelines to the same bytes, at least one of which writes, must be ordered by tokens (events, queues,
handles), flags, or collectives. When each was really done does not matter.
Source: Flanagan and Freund, "FastTrack", PLDI 2009 (epochs).
"""

from collections import defaultdict, deque

OUT, IN, STORE, WAIT, COLLECTIVE, ACCESS, ISSUE = "out", "in", "store", "wait", "collective", "access", "issue"


class HappensBefore:
    """Judges the logs of all ranks; entries are ``(timeline, kind, ...)``, see :meth:`_step`.

    Attributes:
        races: ``(label, label)`` of pairs that nothing orders.
        stuck: what never happened, by timeline.
    """

    def __init__(self, logs: list[list[tuple]]):
        self.races: set[tuple[str, str]] = set()
        self.accesses = 0
        self._clock: dict = defaultdict(dict)
        self._tokens: dict = {}
        self._flags: dict = defaultdict(list)
        self._joined: dict = defaultdict(dict)
        self._memory: dict = defaultdict(dict)
        self._queues: dict = defaultdict(deque)
        for log in logs:
            for timeline, *entry in log:
                self._queues[timeline].append(tuple(entry))
        moved = True
        while moved:
            moved = False
            for timeline in list(self._queues):
                queue = self._queues[timeline]
                while queue and self._step(timeline, queue[0]):
                    queue.popleft()
                    moved = True
        self.stuck = {str(timeline): str(queue[0]) for timeline, queue in self._queues.items() if queue}

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
        elif kind == ISSUE:
            stream, *entries = rest
            token = ("issued", id(entry), len(self._tokens))
            self._tokens[token] = self._leave(timeline)
            self._queues[stream].extend([(IN, token), *entries])
        elif kind == STORE:
            self._flags[rest[0]].append((rest[1], self._leave(timeline)))
        elif kind == WAIT:
            stores = [(0, {}), *self._flags[rest[0]]]  # flags are 0 at first
            clock = next((clock for value, clock in stores if value >= rest[1]), None)
            if clock is None:
                return False
            self._join(timeline, clock)
        elif kind == COLLECTIVE:
            name, rank, size = rest
            joined = self._joined[name]
            if rank not in joined:
                joined[rank] = self._leave(timeline)
            if len(joined) < size:
                return False
            for clock in joined.values():
                self._join(timeline, clock)
        else:
            self._access(timeline, *rest)
        return True

    def _access(self, timeline, label: str, accesses) -> None:
        clock = self._clock[timeline]
        epoch = clock.get(timeline, 0) + 1
        for key, begin, end, writes in accesses:
            self.accesses += 1
            known = self._memory[key]
            for (other, first, last, wrote), (when, said) in known.items():
                conflict = other != timeline and (writes or wrote) and first < end and begin < last
                if conflict and clock.get(other, 0) < when:
                    self.races.add((said, label))
            known[timeline, begin, end, writes] = (epoch, label)
