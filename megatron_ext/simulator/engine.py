"""One event engine for every pipeline rank: compute, links, messages between stages.

[Note: What the engine holds true]
* A rank's training thread walks its steps in order: it waits for the step's input, issues
  the step's gathers (each keeps the thread for as long as its call takes), computes, and waits inside the
  step, before the first layer that uses a group, until the group has arrived.
* Links ``gpu``, ``cpu``, ``nvme``, ``publish`` and ``reduce`` are queues in issue order, one
  each a rank; publishing goes in the order of the schedule from time 0, beside everything else
  (the runtime's publisher has a thread or a stream of its own). All-gathers and reduces of a rank go over one
  communicator, that of its data-parallel group, and so one after another in the order in which they were issued
  (a stream of NCCL's, a thread of gloo's); hierarchical all-gathers have communicators of their own. A ``cpu`` gather also waits until its group is published, a ``nvme`` gather
  until it is staged in, a stage-in until its slot is empty.
* Messages between stages are a queue for each pair of ranks; two stages on one rank need none.
* Activities that overlap slow each other down by the measured slowdowns. Work is fluid: at
  every event the rates of the touched rank are set anew, so a short overlap costs little.
* On machines without accelerators the ranks of a node share its processors: with more ranks
  computing than processors each gets an even share. Transports whose processor time is known
  take it from the same processors: their threads sleep most of the time, so the kernel lets them
  run when they wake up. See processors.py.
* Data-parallel ranks of one pipeline rank behave alike; one of them is simulated, and all
  of them are counted where a node is shared.
* Gradients of a group are reduced as soon as the last backward of its chunk is through the
  lowest layer that uses it, as ``overlap_grad_reduce`` does.
* The optimizer step starts when every rank has reduced its gradients (the gradient norm is
  over all of them). Time 0 is the end of the previous optimizer step.
"""

from collections import deque
from functools import partial
from heapq import heappop, heappush
from operator import mul

from megatron_ext.errors import InputError
from megatron_ext.schedule.trace import Event
from megatron_ext.simulator.lower import ISSUE, REDUCE_GROUP, RUN, WAIT
from megatron_ext.simulator.processors import Processors
from megatron_ext.simulator.timing import COMPUTE, CPU, GPU, KINDS, NVME, P2P, PUBLISH, REDUCE

_ACTIVITY, _ARRIVE, _THREAD, _LIGHTER, _REPAID = range(5)


class Activity:
    """Work in progress on one lane of one rank, at a rate that overlaps change."""

    __slots__ = ("rank", "kind", "size", "remaining", "rate", "updated", "version", "started", "what", "share")

    def __init__(self, rank, kind: int, size: int, work: float, now: float, what, share: float = 0.0):
        self.rank, self.kind, self.size, self.remaining, self.what = rank, kind, size, work, what
        self.rate, self.updated, self.started, self.version = 0.0, now, now, 0
        self.share = share  # of a processor that a transport takes, at rate 1


class RankState:
    """A pipeline rank while it is simulated."""

    __slots__ = (
        "pp_rank", "program", "index", "pc", "operations", "active", "queues", "busy", "blocked_on", "blocked_since",
        "messages", "exposed", "first_start", "last_end", "compute_us", "processors", "weight", "published", "staged", "slot_busy",
        "reducing", "steps_done", "finished_at", "communicator",
    )  # fmt: skip

    def __init__(self, program):
        self.program, self.pp_rank = program, program.pp_rank
        self.index, self.pc, self.operations = -1, 0, ()
        self.active = [None] * len(KINDS)
        self.queues = [deque() for _ in KINDS]
        self.busy = [0.0] * len(KINDS)
        self.blocked_on, self.blocked_since = -1, 0.0
        self.messages = 0
        self.exposed = 0.0
        self.first_start = self.last_end = -1.0
        self.compute_us = 0.0
        self.published: set[int] = set()
        self.staged: set[int] = set()
        self.slot_busy: set[int] = set()
        self.reducing = 0
        self.communicator: deque[int] = deque()  # kinds, of what has been issued to it and is not done
        self.steps_done = False
        self.finished_at = -1.0


class Engine:
    """Runs the programs of all ranks through one iteration; see the note above.

    Args:
        programs: one :class:`~megatron_ext.simulator.lower.RankProgram` a pipeline rank.
        workload, timing: what is trained, and on what.
        publish: per pipeline rank, ``(group, size_bytes, us, processor_us)`` in the order of publishing.
        trace: keep every interval as an event of the trace.
    """

    def __init__(self, programs, workload, timing, publish, *, trace: bool = False):
        self.workload, self.timing, self.publish = workload, timing, publish
        parallel = workload.parallel
        self.pp, self.stages, self.microbatches = parallel.pp, parallel.pp * parallel.vp, parallel.num_microbatches
        self.ranks = [RankState(program) for program in programs]
        self.arrived = bytearray(2 * self.stages * self.microbatches)
        self.edge_free: dict[tuple[int, int], float] = {}
        self.heap: list[tuple] = []
        self.order = 0
        self.now = 0.0
        self.events: list[Event] | None = [] if trace else None
        self.group_exposed: dict[int, float] = {}
        on_machine: dict[int, list[RankState]] = {}
        for rank in self.ranks:
            on_machine.setdefault(timing.machine_of(rank.pp_rank, 0), []).append(rank)
        for machine, there in on_machine.items():
            processors = Processors(timing.processors, partial(self._share, there), self._wake)
            for rank in there:
                rank.processors = processors
                rank.weight = sum(
                    timing.machine_of(rank.pp_rank, dp, tp) == machine
                    for dp in range(parallel.dp) for tp in range(parallel.tensor_model_parallel_size)
                )  # fmt: skip
                processors.ranks += rank.weight
        self.p2p_disturbs = timing.disturbs[P2P]
        self.takes_processor = timing.takes_processor
        self.waiting_for_optimizer = len(self.ranks)

    # -- running ----------------------------------------------------------------------------

    def run(self) -> float:
        """Simulate one iteration and return its length in microseconds."""
        for rank in self.ranks:
            self._begin(rank)
            self._touch(rank)
        heap = self.heap
        while heap:
            time, _, kind, subject, version = heappop(heap)
            if kind == _ACTIVITY:
                if subject.version != version:
                    continue
                self.now = time
                self._finish(subject)
                self._touch(subject.rank)
            elif kind == _ARRIVE:
                self.now = time
                self._arrive(subject)
            elif kind == _LIGHTER:
                self.now = time
                share, *both = subject
                for rank in both:
                    rank.processors.take(time, -share * rank.weight)
            elif kind == _REPAID:
                self.now = time
                subject.repaid(time, version)
            else:
                self.now = time
                self._walk(subject)
                self._touch(subject)
        if self.waiting_for_optimizer:
            self._explain_deadlock()
        return max(rank.finished_at for rank in self.ranks)

    def _explain_deadlock(self):
        for rank in self.ranks:
            if rank.blocked_on >= 0:
                gather = rank.program.gathers[rank.blocked_on]
                raise InputError(
                    f"pipeline rank {rank.pp_rank} waits for ever for group {gather.group} at step {self._name(rank)}",
                    field="ranks",
                )
        raise AssertionError("the steps of the pipeline wait for each other in a circle")

    def _push(self, time: float, kind: int, subject, version: int = 0) -> None:
        self.order += 1
        heappush(self.heap, (time, self.order, kind, subject, version))

    def _wake(self, processors: Processors, time: float, version: int) -> None:
        self._push(time, _REPAID, processors, version)

    # -- the training thread ------------------------------------------------------------------

    def _begin(self, rank: RankState) -> None:
        rank.queues[PUBLISH].extend(self.publish[rank.pp_rank])
        self._serve(rank, PUBLISH)
        rank.operations = rank.program.start
        self._walk(rank)

    def _walk(self, rank: RankState) -> None:
        """Let the thread of ``rank`` go on until it computes, waits, or has done all steps."""
        while True:
            operations = rank.operations
            while rank.pc < len(operations):
                operation = operations[rank.pc]
                code = operation[0]
                if code == RUN:
                    rank.pc += 1
                    self._compute(rank, operation[1])
                    return
                if code == WAIT:
                    gather = rank.program.gathers[operation[1]]
                    if not gather.done:
                        if rank.blocked_on < 0:
                            rank.blocked_on, rank.blocked_since = operation[1], self.now
                        return
                    rank.pc += 1
                    continue
                rank.pc += 1
                if code == ISSUE:
                    gather = rank.program.gathers[operation[1]]
                    gather.issued_us = self.now
                    link = GPU if gather.route == GPU else CPU  # a staged group leaves its slot over PCIe
                    rank.queues[link].append(gather)
                    if gather.flat:
                        rank.communicator.append(GPU)
                    self._serve(rank, link)
                    if gather.call_us:
                        self._record(rank, "issue", str(gather.group), self.now, gather.call_us)
                        self._push(self.now + gather.call_us, _THREAD, rank)
                        return
                elif code == REDUCE_GROUP:
                    rank.reducing += 1
                    rank.queues[REDUCE].append(operation)
                    rank.communicator.append(REDUCE)
                    self._serve(rank, REDUCE)
                else:
                    rank.queues[NVME].append(operation)
                    self._serve(rank, NVME)
            if rank.index >= 0:
                self._end_step(rank)
            rank.index += 1
            rank.pc = 0
            if rank.index == len(rank.program.steps):
                rank.steps_done = True
                self._maybe_optimize(rank)
                return
            rank.operations = rank.program.steps[rank.index][3]
            if not self._has_input(rank):
                rank.operations = ()  # _arrive goes on from here
                return
            if rank.first_start < 0:
                rank.first_start = self.now

    def _has_input(self, rank: RankState) -> bool:
        stage, backward, microbatch, _ = rank.program.steps[rank.index]
        if stage == 0 and not backward:
            return True
        if backward and stage == self.stages - 1:
            return True  # its own forward came before
        return bool(self.arrived[self._slot(stage, backward, microbatch)])

    def _slot(self, stage: int, backward: bool, microbatch: int) -> int:
        return (stage * 2 + backward) * self.microbatches + microbatch

    def _arrive(self, subject) -> None:
        sender, receiver, slot = subject
        self.arrived[slot] = 1
        if self.p2p_disturbs:
            for rank in (sender, receiver):
                rank.messages -= 1
                self._touch(rank)
        rank = receiver
        if rank.index < 0 or rank.steps_done or rank.pc or rank.operations:
            return
        stage, backward, microbatch, operations = rank.program.steps[rank.index]
        if self._slot(stage, backward, microbatch) == slot:
            rank.operations = operations
            if rank.first_start < 0:
                rank.first_start = self.now
            self._walk(rank)
            self._touch(rank)

    def _compute(self, rank: RankState, us: float) -> None:
        rank.compute_us += us
        rank.active[COMPUTE] = Activity(rank, COMPUTE, 0, us, self.now, None)
        if rank.processors.count is not None:
            rank.processors.compute(self.now, rank.weight)

    def _share(self, ranks: list[RankState]) -> None:
        """The processors left to compute have changed."""
        for rank in ranks:
            if rank.active[COMPUTE] is not None:
                self._set_rate(rank, rank.active[COMPUTE])

    def _end_step(self, rank: RankState) -> None:
        stage, backward, microbatch, _ = rank.program.steps[rank.index]
        rank.last_end = self.now
        target = stage - 1 if backward else stage + 1
        if 0 <= target < self.stages:
            slot = self._slot(target, backward, microbatch)
            receiver = self.ranks[target % self.pp]
            if receiver is rank or not self.timing.p2p_us:
                self.arrived[slot] = 1
                if receiver is not rank:
                    self._push(self.now, _ARRIVE, self._message(rank, receiver, slot))
            else:
                self._send(rank, receiver, slot)

    def _message(self, sender, receiver, slot):
        if self.p2p_disturbs:
            for rank in (sender, receiver):
                rank.messages += 1
                self._touch(rank)
        return sender, receiver, slot

    def _send(self, sender: RankState, receiver: RankState, slot: int) -> None:
        us = self.timing.p2p_us
        if self.timing.disturbed[P2P]:
            # A message is short: its slowdown is that of the moment at which it leaves.
            excess = self.timing.excess(P2P, self.workload.p2p_bytes)
            share = [float(busy is not None) for busy in sender.active]
            there = receiver.processors
            if there.count is not None:
                # It waits for a processor at both ends, and was measured with every rank computing.
                share[COMPUTE] = there.load / there.ranks
            us *= 1.0 + sum(map(mul, excess, share))
        edge = (sender.pp_rank, receiver.pp_rank)
        start = max(self.now, self.edge_free.get(edge, 0.0))
        self.edge_free[edge] = start + us
        sender.busy[P2P] += us
        self._record(sender, "p2p", f"to {receiver.pp_rank}", start, us)
        if self.takes_processor[P2P]:
            share = self.timing.processor_us(P2P, self.workload.p2p_bytes) / (start + us - self.now)
            for rank in (sender, receiver):
                rank.processors.take(self.now, share * rank.weight)
            self._push(start + us, _LIGHTER, (share, sender, receiver))
        self._push(start + us, _ARRIVE, self._message(sender, receiver, slot))

    def _maybe_optimize(self, rank: RankState) -> None:
        if not rank.steps_done or rank.reducing or rank.finished_at >= 0:
            return
        rank.finished_at = self.now
        self.waiting_for_optimizer -= 1
        if self.waiting_for_optimizer:
            return
        done = self.now + max(other.processors.owed_us(self.now) for other in self.ranks)
        for other in self.ranks:
            size = sum(chunk.bytes for chunk in self.workload.chunks_of_rank(other.pp_rank))
            us = self.timing.optimizer_us(size)
            other.finished_at = done + us
            if us:
                self._record(other, "optimizer", "optimizer", done, us)

    # -- links ------------------------------------------------------------------------------

    def _serve(self, rank: RankState, kind: int) -> None:
        """Start the head of a link's queue if the link is idle and the head may go."""
        if rank.active[kind] is not None or not rank.queues[kind]:
            return
        head = rank.queues[kind][0]
        if kind in (GPU, CPU):
            gather = head
            if gather.flat and rank.communicator[0] != GPU:
                return
            if kind == CPU and gather.group not in (rank.published if gather.route == CPU else rank.staged):
                return
            size, us = gather.bytes, gather.us
            gather.start_us = self.now
        elif kind == NVME:
            _, group, slot, size, us = head
            if slot in rank.slot_busy or group not in rank.published:
                return
            rank.slot_busy.add(slot)
        elif kind == REDUCE:
            if rank.communicator[0] != REDUCE:
                return
            _, _, size, us = head
        else:
            _, size, us, used = head
        rank.queues[kind].popleft()
        share = 0.0
        if self.takes_processor[kind] and us:
            share = (used if kind == PUBLISH else self.timing.processor_us(kind, size)) / us
        rank.active[kind] = Activity(rank, kind, size, us, self.now, head, share)

    def _finish(self, activity: Activity) -> None:
        rank, kind = activity.rank, activity.kind
        rank.active[kind] = None
        lasted = self.now - activity.started
        rank.busy[kind] += lasted
        if kind == COMPUTE:
            if rank.processors.count is not None:
                rank.processors.compute(self.now, -rank.weight)
            self._record(rank, "compute", self._name(rank), activity.started, lasted)
            self._walk(rank)
            return
        if activity.share:
            rank.processors.take(self.now, -activity.share * activity.rate * rank.weight)
        what = activity.what
        if kind in (GPU, CPU):
            self._record(rank, KINDS[kind], str(what.group), activity.started, lasted)
            if what.flat:
                rank.communicator.popleft()
                self._serve(rank, REDUCE)
            if what.route == NVME:
                rank.staged.discard(what.group)
                rank.slot_busy.discard(what.slot)
                self._serve(rank, NVME)
            self._whole(rank, what)
        elif kind == NVME:
            self._record(rank, "nvme", str(what[1]), activity.started, lasted)
            rank.staged.add(what[1])
            self._serve(rank, CPU)
        elif kind == PUBLISH:
            self._record(rank, "publish", str(what[0]), activity.started, lasted)
            rank.published.add(what[0])
            self._serve(rank, CPU)
            self._serve(rank, NVME)
        elif kind == REDUCE:
            self._record(rank, "reduce", str(what[1]), activity.started, lasted)
            rank.reducing -= 1
            rank.communicator.popleft()
            self._serve(rank, GPU)
            self._maybe_optimize(rank)
        self._serve(rank, kind)

    def _whole(self, rank: RankState, gather) -> None:
        gather.done, gather.end_us = True, self.now
        if rank.blocked_on >= 0 and rank.program.gathers[rank.blocked_on] is gather:
            waited = self.now - rank.blocked_since
            rank.exposed += waited
            self.group_exposed[gather.group] = self.group_exposed.get(gather.group, 0.0) + waited
            self._record(rank, "wait", f"{self._name(rank)} for {gather.group}", rank.blocked_since, waited)
            rank.blocked_on = -1
            self._walk(rank)

    # -- rates ------------------------------------------------------------------------------

    def _touch(self, rank: RankState) -> None:
        """Set the rates of everything that runs on ``rank`` to what its neighbours now allow."""
        for activity in rank.active:
            if activity is not None:
                self._set_rate(rank, activity)

    def _set_rate(self, rank: RankState, activity: Activity) -> None:
        kind = activity.kind
        rate = 1.0
        if self.timing.disturbed[kind]:
            excess = self.timing.excess(kind, activity.size)
            slower = 1.0
            active = rank.active
            for other, share in enumerate(excess):
                if share and other != kind and (active[other] is not None or (other == P2P and rank.messages)):
                    slower += share
            rate = 1.0 / slower
        if kind == COMPUTE and rank.processors.count is not None:
            rate *= rank.processors.speed()
        if rate == activity.rate:
            return
        if activity.share:
            rank.processors.take(self.now, activity.share * (rate - activity.rate) * rank.weight)
        now = self.now
        if activity.rate:
            activity.remaining -= activity.rate * (now - activity.updated)
        activity.updated, activity.rate = now, rate
        activity.version += 1
        self.order += 1
        heappush(self.heap, (now + max(activity.remaining, 0.0) / rate, self.order, _ACTIVITY, activity, activity.version))

    # -- trace ------------------------------------------------------------------------------

    def _name(self, rank: RankState) -> str:
        if not 0 <= rank.index < len(rank.program.steps):
            return "start"
        stage, backward, microbatch, _ = rank.program.steps[rank.index]
        return f"{stage}{'B' if backward else 'F'}{microbatch}"

    def _record(self, rank: RankState, lane: str, name: str, start: float, duration: float) -> None:
        if self.events is not None:
            number = self.workload.parallel.global_rank(rank.pp_rank, 0)
            self.events.append(Event(number, lane, name, start, duration))
