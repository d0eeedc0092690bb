"""One event engine for every pipeline rank: compute, links, messages between stages.

[Note: What the engine simulates]
* The training thread of a rank runs its steps in order. It waits for the step's input, issues the step's gathers (each
  call keeps the thread for a while), computes, and waits before the first layer that uses a group until the group
  has arrived.
* Links ``gpu``, ``cpu``, ``nvme``, ``publish`` and ``reduce`` are queues in issue order, one of each on every rank.
  Publishing starts at time 0, in the order of the schedule, at the same time as everything else.
* All-gathers and reductions of a rank use one communicator, that of its data-parallel group, and run one after
  another in issue order. Those of experts have another, that of the expert-data-parallel group; hierarchical
  all-gathers and those of shards from host memory have communicators of their own. All share the links.
* Messages between stages are one queue for each pair of ranks. Two stages on one rank need no message.
* Activities that overlap slow each other down by the measured slowdowns. At every event the rates of the rank are set
  again, so a short overlap costs little.
* Gradients of a group are reduced as soon as the last backward of its chunk has passed the lowest layer that uses it,
  as ``overlap_grad_reduce`` does. Whole gradients that come and go are reduced after the backward steps that the
  schedule names. Before such a reduce the thread waits for the previous one, whose whole gradient is then freed. If a
  gradient is allocated alone, the thread waits before the allocation. Gradients that are added up in host memory are
  copied there over the link on which groups are published, and added by the host.
* Activities that move bytes in host memory share its bandwidth (:mod:`megatron_ext.simulator.host_memory_link`).
* The optimizer step starts when every rank has reduced its gradients, because the gradient norm needs all of them.
  Time 0 is the end of the previous optimizer step.
* If the host's optimizer steps during the backward, it steps one group after another as their gradients are reduced,
  until its rank has reduced all gradients. The step at the end waits for the last of these steps, and is shorter by
  their work.
* If updates are delayed, the host steps on the gradients of the previous iteration once the parameters are published.
  The optimizer between two iterations then waits for that step, and is shorter by its work.
* Data-parallel ranks of one pipeline rank behave alike, so one of them is simulated.
"""

from heapq import heappop, heappush

from megatron_ext.formats.errors import InputError
from megatron_ext.simulator.activity_kinds import COMPUTE, NVME, P2P, PUBLISH
from megatron_ext.simulator.links import Links
from megatron_ext.simulator.rank_programs import ISSUE, REDUCE_GROUP, REDUCE_VISIT, RUN, SETTLE, WAIT
from megatron_ext.simulator.rank_state import Activity, RankState

_ACTIVITY, _ARRIVE, _THREAD = range(3)
"""Events: an activity ends, a message arrives, a thread continues after a call."""


class Engine(Links):
    """Runs the programs of all ranks through one iteration; see the note above."""

    # -- running ----------------------------------------------------------------------------

    def run(self) -> float:
        """Simulate one iteration and return its length in microseconds."""
        for rank in self.ranks:
            rank.queues[PUBLISH].extend(self.publish[rank.pp_rank])
            self.serve(rank, PUBLISH)
            self.delay_step(rank)
            rank.operations = rank.program.start
            self.run_thread(rank)
            self._set_rates(rank)
        heap = self.heap
        # ends: every activity and message is pushed when it begins, and an activity again when its rate changes. Rates
        # change only when an activity or message begins or ends, and the program of a rank begins finitely many.
        while heap:
            time, _, event, subject, version = heappop(heap)
            if event == _ACTIVITY and subject.version != version:
                continue
            self.now = time
            if event == _ACTIVITY:
                self._activity_ended(subject)
                self._set_rates(subject.rank)
            elif event == _ARRIVE:
                self._message_arrived(*subject)
            else:
                self.run_thread(subject)
                self._set_rates(subject)
        if self.waiting_for_optimizer:
            self._explain_deadlock()
        return max(rank.finished_at for rank in self.ranks)

    def _explain_deadlock(self) -> None:
        for rank in self.ranks:
            if rank.blocked_on >= 0:
                gather = rank.program.gathers[rank.blocked_on]
                said = f"waits for ever for group {gather.group} at step {rank.step_name}"
                raise InputError(f"pipeline rank {rank.pp_rank} {said}", field="ranks")
        raise AssertionError("the steps of the pipeline wait for each other in a circle")

    def _push(self, time: float, event: int, subject, version: int = 0) -> None:
        self.order += 1
        heappush(self.heap, (time, self.order, event, subject, version))

    # -- the training thread ------------------------------------------------------------------

    def run_thread(self, rank: RankState) -> None:
        """Let the thread of ``rank`` continue until it computes, waits, or has done all steps."""
        while True:  # ends: each turn takes up the next step or returns
            operations = rank.operations
            if rank.index >= 0 and rank.first_start < 0:
                rank.first_start = self.now
            while rank.position < len(operations):  # ends: _run_operation raises the position or returns False
                if not self._run_operation(rank, operations[rank.position]):
                    return
            if rank.index >= 0:
                self._end_step(rank)
            rank.index += 1
            rank.position = 0
            if rank.index == len(rank.program.steps):
                rank.steps_done, rank.blocked_since = True, self.now
                self.start_optimizer(rank)
                return
            rank.operations = rank.program.steps[rank.index][3]
            if not self._has_input(rank):
                rank.operations = ()  # _message_arrived continues from here
                return

    def _run_operation(self, rank: RankState, operation: tuple) -> bool:
        """Run one operation of a step; returns False if the thread has to stop for now."""
        code = operation[0]
        if code == RUN:
            rank.position += 1
            rank.compute_us += operation[1]
            rank.active[COMPUTE] = Activity(rank, COMPUTE, 0, operation[1], self.now, None)
            return False
        if code == WAIT:
            if rank.program.gathers[operation[1]].done:
                rank.position += 1
                return True
            if rank.blocked_on < 0:
                rank.blocked_on, rank.blocked_since = operation[1], self.now
            return False
        if code in (REDUCE_VISIT, SETTLE) and rank.whole_gradient:
            rank.settling, rank.blocked_since = True, self.now
            return False
        rank.position += 1
        if code == SETTLE:
            return True
        if code == ISSUE:
            gather = rank.program.gathers[operation[1]]
            self.issue_gather(rank, gather)
            if gather.call_us:
                self.record(rank, "issue", str(gather.group), self.now, gather.call_us)
                self._push(self.now + gather.call_us, _THREAD, rank)
                return False
        elif code in (REDUCE_GROUP, REDUCE_VISIT):
            rank.whole_gradient |= code == REDUCE_VISIT
            self.issue_reduce(rank, operation)
        else:
            rank.queues[NVME].append(operation)
            self.serve(rank, NVME)
        return True

    def _activity_ended(self, activity: Activity) -> None:
        rank, kind = activity.rank, activity.kind
        rank.active[kind] = None
        lasted = self.now - activity.started
        rank.busy[kind] += lasted
        if kind == COMPUTE:
            if self.events is not None:
                self.record(rank, "compute", rank.step_name, activity.started, lasted)
            self.run_thread(rank)
            return
        self.transport_ended(rank, kind, activity, lasted)

    # -- messages between stages -------------------------------------------------------------------

    def _has_input(self, rank: RankState) -> bool:
        stage, backward, microbatch, _ = rank.program.steps[rank.index]
        first = self.stages - 1 if backward else 0  # the input of its backward is the output of its own forward
        return stage == first or bool(self.arrived[self._slot(stage, backward, microbatch)])

    def _slot(self, stage: int, backward: bool, microbatch: int) -> int:
        return (stage * 2 + backward) * self.microbatches + microbatch

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
                    self._push_message(self.now, rank, receiver, slot)
            else:
                self._send(rank, receiver, slot)

    def _send(self, sender: RankState, receiver: RankState, slot: int) -> None:
        # A message is short: it has the slowdown of the moment at which it leaves.
        slowing, active = self.slowdowns.slowing(P2P, self.workload.p2p_bytes), sender.active
        excess = sum(excess / busy.slack for other, excess in slowing if (busy := active[other]) is not None)
        us = self.timing.p2p_us * (1.0 + excess)
        edge = (sender.pp_rank, receiver.pp_rank)
        start = max(self.now, self.edge_free.get(edge, 0.0))
        self.edge_free[edge] = start + us
        sender.busy[P2P] += us
        if self.events is not None:  # only a trace needs names, and most simulations keep none
            self.record(sender, "p2p", f"to {receiver.pp_rank}", start, us)
        self._push_message(start + us, sender, receiver, slot)

    def _push_message(self, arrival: float, sender: RankState, receiver: RankState, slot: int) -> None:
        self._count_messages(1, sender, receiver)
        self._push(arrival, _ARRIVE, (sender, receiver, slot))

    def _count_messages(self, more: int, *ranks: RankState) -> None:
        """Change the number of messages on their way at both ends."""
        for rank in ranks if self.messages_disturb else ():
            rank.messages += more
            self._set_rates(rank)

    def _message_arrived(self, sender: RankState, receiver: RankState, slot: int) -> None:
        self.arrived[slot] = 1
        self._count_messages(-1, sender, receiver)
        if receiver.index < 0 or receiver.steps_done or receiver.position or receiver.operations:
            return
        stage, backward, microbatch, operations = receiver.program.steps[receiver.index]
        if self._slot(stage, backward, microbatch) == slot:
            receiver.operations = operations
            self.run_thread(receiver)
            self._set_rates(receiver)

    # -- rates ------------------------------------------------------------------------------

    def _set_rates(self, rank: RankState) -> None:
        """Set the rate of every activity on ``rank`` from the activities that run at the same time and from its share
        of host memory. A simulation spends most of its time here."""
        active, memory, speed, now = rank.active, self.host_memory, 1.0, self.now
        running = [activity for activity in active if activity is not None]
        if memory is not None:
            speed = memory.speed(running)
            if rank.memory_full:
                rank.memory_full_us += now - rank.memory_since
            rank.memory_full, rank.memory_since = speed < 1.0, now
        for activity in running:
            rate = speed if activity.memory else 1.0
            if len(running) > 1 or rank.messages:
                slower = 1.0
                for other, excess in self.slowdowns.slowing(activity.kind, activity.size):
                    if (busy := active[other]) is not None:
                        slower += excess / busy.slack
                    elif other == P2P and rank.messages:
                        slower += excess
                rate /= slower
            if activity.slack > 1.0:  # only the part that does not wait for the drive is slowed
                rate = min(rate * activity.slack, 1.0)
            if rate == activity.rate:
                continue
            if activity.rate:
                activity.remaining -= activity.rate * (now - activity.updated)
            activity.updated, activity.rate = now, rate
            activity.version += 1
            self._push(now + max(activity.remaining, 0.0) / rate, _ACTIVITY, activity, activity.version)
