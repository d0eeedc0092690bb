"""Collectives of the strict stand-in: each communicator is a timeline of its own, on which the ranks meet.

NCCL makes a communicator at its first collective: ``ncclCommInitRank`` waits for all of its ranks, on the thread that
issues, and takes memory of the device. So a rank is held there, with the driver's lock. Ranks that make two of them in
different orders, or one that fails alone before, are said after ``stuck_seconds``, with where the threads are.
"""

import _thread
import itertools
import sys
import threading
from functools import partial
from unittest import mock

import torch.distributed as dist
from driver_lock import stack_text
from strict_engine import ONE_QUEUE, where
from strict_memory import tensors_in
from torch._C._distributed_c10d import ProcessGroup
from torch.utils._python_dispatch import _disable_current_modes

NAMES = (
    "_allgather_base _reduce_scatter_base allreduce broadcast allgather allgather_into_tensor_coalesced "
    "all_gather_single all_gather_single_coalesced reduce_scatter_single reduce_scatter_single_coalesced "
    "reduce_scatter_tensor_coalesced allreduce_coalesced barrier reduce gather scatter alltoall alltoall_base send recv"
).split()

FROM_ROOT, TO_ROOT = ("broadcast", "scatter"), ("reduce", "gather")
"""Those in which a rank waits for one other alone, or for none."""


class Collectives:
    """Patches of process groups; ``strict`` is the stand-in."""

    numbers = itertools.count()

    def __init__(self, strict):
        self.strict, self.engine, self.memory, self.rank = strict, strict.engine, strict.memory, strict.rank
        self._sequence: dict[int, int] = {}
        self._last: dict[str, _Work] = {}  # by communicator
        self._messages: dict[tuple, int] = {}  # sent and received so far, by sender and receiver
        self._number = next(self.numbers)  # the same on all ranks: process groups outlive a stand-in

    def patches(self):
        for name in filter(partial(hasattr, ProcessGroup), NAMES):  # releases of torch differ
            yield mock.patch.object(ProcessGroup, name, self.collective(name, getattr(ProcessGroup, name)))
        for name in ("all_gather_object", "broadcast_object_list"):
            yield mock.patch.object(dist, name, self._objects(getattr(dist, name)))

    def meeting(self, process_group) -> tuple:
        """The entry in which all ranks of a collective meet."""
        number = self._sequence.get(id(process_group), 0)
        self.memory.check_time(self.memory.in_steps and number == 0, "a communicator, made at its first collective,")
        self._sequence[id(process_group)] = number + 1
        ranks = tuple(dist.get_process_group_ranks(process_group))
        if number == 0:
            self._connect(process_group.group_name, ranks)
        return ("collective", (ranks, process_group.group_name, number), self.rank, len(ranks))

    def _source(self, process_group, name: str, root: int) -> tuple[int, ...]:
        """The only rank that this one waits for in a collective of ``root``, if there is only one."""
        if root < 0:
            return ()
        source = dist.get_process_group_ranks(process_group)[root]
        if name in TO_ROOT:
            return () if source == self.rank else (self.rank,)
        return (source,)

    def _message(self, process_group, sends: bool, other: int) -> tuple:
        """The entry for a message to or from rank ``other`` of the process group, and the communicator of the two."""
        ranks, here = dist.get_process_group_ranks(process_group), self.rank
        pair = (here, ranks[other]) if sends else (ranks[other], here)
        name = (process_group.group_name, *pair)
        number = self._messages[name] = self._messages.get(name, 0) + 1
        inside = f"communicator {id(process_group)} of {sorted(pair)}"
        return ("out" if sends else "in", ("message", *name, number)), inside

    def _connect(self, name: str, ranks: tuple[int, ...]) -> None:
        """All ranks make the communicator of a process group."""
        store, engine = dist.distributed_c10d._get_default_store(), self.engine
        key = f"strict {self._number} {name} {{}}".format
        here = lambda rank: store.check([key(rank)])

        def missing() -> str:
            names, frames = {one.ident: one.name for one in threading.enumerate()}, sys._current_frames()
            stacks = [f"  thread {names.get(one)}:\n{stack_text(frame)}" for one, frame in frames.items()]
            absent = [rank for rank in ranks if not here(rank)]
            return "\n".join([f"rank {self.rank} of {ranks} waits for ranks {absent} to connect", *stacks])

        store.set(key(self.rank), "")
        ends = engine.ends(list(engine.streams))
        engine.hold("ncclCommInitRank", ends, lambda: all(map(here, ranks)), joins=False, missing=missing)

    def _objects(self, original):
        def run(*args, **kwargs):
            together = self.meeting(kwargs.get("group") or dist.distributed_c10d._get_default_group())
            self.engine.here.quiet = True
            try:
                with _disable_current_modes():
                    result = original(*args, **kwargs)
            finally:
                self.engine.here.quiet = False
            self.engine.log(together)
            return result

        return run

    def collective(self, name: str, original):
        def issue(process_group, *args, **kwargs):
            if getattr(self.engine.here, "quiet", False) or self.engine.closed:
                return original(process_group, *args, **kwargs)
            engine, stream = self.engine, self.engine.current_work()
            label, inside = f"{name} at {where()}", f"communicator {id(process_group)}"
            one_to_one, root = name in ("send", "recv"), root_of(name, args)
            if one_to_one and all(self.memory.region(t.data_ptr()) is not None for t in tensors_in(args[0])):
                return original(process_group, *args, **kwargs)  # between processors: strict_runtime.py
            engine.call(label)
            accesses = self._accesses(name, label, args, root >= 0 and dist.get_rank(process_group) == root)
            before, after = engine.token(), engine.token()
            engine.log_on(stream, ("out", before))
            access = ("access", label, accesses)
            if one_to_one:
                meeting, inside = self._message(process_group, name == "send", args[1])
            else:
                meeting = self.meeting(process_group) + self._source(process_group, name, root)
            engine.log_on(inside, ("in", before), access, meeting, access, ("out", after))
            # A communicator begins its collectives in the order in which they are issued, whatever their streams are.
            earlier = self._last.get(inside)
            has_begun = lambda: earlier is None or earlier.inner is not None
            if stream is engine.default:
                engine.until(has_begun)
                engine.drain(accesses)
                self._last[inside] = work = _Work(engine, original(process_group, *args, **kwargs), after)
                if engine.order == ONE_QUEUE:  # nothing begins before it has ended
                    engine.until(work.wait_aside())
                return work
            self._last[inside] = work = _Work(engine, None, after)
            later = self.strict.temporaries.lent(args)

            def begin():
                work.inner = original(process_group, *later, **kwargs)
                return work.wait_aside()

            stream.add(begin, has_begun, what=label)
            return work

        return issue

    def _accesses(self, name: str, label: str, args, is_root: bool) -> list[tuple]:
        """What is given first is written, what is given second is read; a part that is gathered in place only read, and
        what is sent."""
        sent = name == "send" or (name == "broadcast" and is_root) or (name == "reduce" and not is_root)
        both = ((), args[0]) if sent else (*args, (), ())[:2]
        written, read = ([(t, self.memory.place(t, label)) for t in tensors_in(one)] for one in both)
        if any(place is not None and self.memory.region(t.data_ptr()) is not None for t, place in (*written, *read)):
            self.engine.error(f"{label} is given host memory")
        own = {place for _, place in read if place is not None}
        accesses = [(*place, False) for place in own]
        for key, begin, end in (place for _, place in written if place is not None):
            for place, first, last in own:
                if place == key and begin <= first and last <= end and "gather" in name:
                    accesses.append((key, begin, first, True))
                    begin = last
            accesses.append((key, begin, end, True))
        return accesses


def root_of(name: str, args) -> int:
    """The root of a collective, in its process group; -1: it has none."""
    if name not in (*FROM_ROOT, *TO_ROOT):
        return -1
    return next((one.rootRank for one in args if hasattr(one, "rootRank")), args[1] if name == "broadcast" else 0)


class _Work:
    """Handle of a collective: the current stream waits for the communicator's."""

    def __init__(self, engine, inner, token):
        self.engine, self.inner, self._token = engine, inner, token
        self._once, self._waited = threading.Lock(), False

    def wait(self, *args):
        engine, stream = self.engine, self.engine.current_work()
        engine.call("the wait for a collective")
        engine.log_on(stream, ("in", self._token))
        if stream is engine.default:
            engine.until(lambda: self.inner is not None)
            engine.drain()
            return self._wait(*args)
        stream.add(self.wait_aside, lambda: self.inner is not None, what="waits for a collective")
        return True

    def wait_aside(self):
        """Some of gloo's handles know that they have ended only when they are waited for."""
        ended = threading.Event()
        _thread.start_new_thread(lambda: (self._wait(), ended.set()), ())
        return ended.is_set

    def _wait(self, *args):
        # Gloo copies some results each time they are waited for, also over what has been made of them since.
        with self._once, _disable_current_modes():
            if not self._waited:
                self.inner.wait(*args)
            self._waited = True

    def __getattr__(self, name):
        return getattr(self.inner, name)
