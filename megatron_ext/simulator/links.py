"""The links of the simulated ranks: queues in issue order, what starts when an activity ends, and the optimizer."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence

from megatron_ext.cost.cost_table import KINDS
from megatron_ext.formats.trace import Event, Lane
from megatron_ext.simulator.activity_kinds import CPU, GPU, HOST_ADD, HOST_STEP, NVME, P2P, PUBLISH, REDUCE
from megatron_ext.simulator.host_memory_link import HostMemoryLink
from megatron_ext.simulator.rank_programs import REDUCE_VISIT, SHARD, Gather, RankProgram
from megatron_ext.simulator.rank_state import Activity, RankState
from megatron_ext.simulator.step_places import DelayedStep, EarlyStepsByGroup
from megatron_ext.simulator.timing import Timing
from megatron_ext.workload.workload import Workload


class Links(ABC):
    """The state of a simulation, and what its links do; the engine adds the training threads. Times are microseconds
    since the last optimizer step.

    Args:
        programs: one per pipeline rank.
        workload, timing: what is trained, and the durations of its activities.
        publish: per pipeline rank, ``(group, size_bytes, us)`` in the order of publishing.
        trace: keep every interval as an event of the trace.
        early: groups that the host's optimizer steps during the backward, or None.
        delayed: by pipeline rank, its step during the next iteration; empty where none is delayed.
        states_us: by pipeline rank, how long optimizer states on the drive are read and written during the step.
        optimizer_us: by pipeline rank, the time of the optimizer's step, of the part of it that no step during the
            backward can spare, and of the host's steps of groups in it.
    """

    def __init__(
        self,
        programs: Iterable[RankProgram],
        workload: Workload,
        timing: Timing,
        publish: list[list[tuple[int, int, float]]],
        *,
        trace: bool = False,
        states_us: Sequence[float] = (),
        early: EarlyStepsByGroup | None = None,
        delayed: Sequence[DelayedStep] = (),
        optimizer_us: Sequence[tuple[float, float, float]],
    ):
        self.workload, self.timing, self.publish = workload, timing, publish
        self.states_us, self.early, self.delayed = states_us, early, delayed
        self.optimizer_us = optimizer_us
        memory = timing.table.host_memory
        self.host_memory = None if memory is None else HostMemoryLink(workload, memory.bytes_per_s / 1e6)
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
        self.slowdowns = timing.slowdowns
        self.messages_disturb = self.slowdowns.disturbs[P2P]
        self.waiting_for_optimizer = len(self.ranks)

    @abstractmethod
    def run_thread(self, rank: RankState) -> None:
        """Let the thread of ``rank`` continue until it computes, waits, or has done all steps."""

    def gather_ended(self, rank: RankState, gather: Gather) -> None:
        """The group is whole; the thread continues if it has waited for the group."""
        gather.done, gather.end_us = True, self.now
        if rank.blocked_on >= 0 and rank.program.gathers[rank.blocked_on] is gather:
            waited = self.now - rank.blocked_since
            rank.exposed += waited
            self.group_exposed[gather.group] = self.group_exposed.get(gather.group, 0.0) + waited
            if self.events is not None:
                self.record(rank, "wait", f"{rank.step_name} for {gather.group}", rank.blocked_since, waited)
            rank.blocked_on = -1
            self.run_thread(rank)

    def host_stepped(self, rank: RankState, name: str, begin: float, step_us: float, drive_us: float) -> None:
        """The host has stepped groups. In the same time the drive has read and written states."""
        rank.busy[NVME] += drive_us
        if step_us > 0:
            self.record(rank, "host_step", name, begin, step_us)
        if drive_us > 0:
            self.record(rank, KINDS[NVME], f"states {name}", begin, drive_us)

    def gradient_freed(self, rank: RankState) -> None:
        """A gradient that comes and goes is reduced (and copied, if it is added up on the host): free the whole one."""
        rank.whole_gradient = False
        if rank.settling or rank.steps_done:
            self.record(rank, "reduce_wait", "a gradient", rank.blocked_since, self.now - rank.blocked_since)
        if rank.settling:
            rank.settling = False
            self.run_thread(rank)

    def start_optimizer(self, rank: RankState) -> None:
        """The optimizer steps once every rank has done its steps and reduced its gradients."""
        if not rank.steps_done or rank.reducing or rank.finished_at >= 0:
            return
        rank.finished_at = self.now
        if not self.delayed:
            rank.queues[HOST_STEP].clear()
        self.waiting_for_optimizer -= 1
        if self.waiting_for_optimizer:
            return
        for other in self.ranks:
            other.norm_at = self.now
            if not self.delayed and other.active[HOST_STEP] is None or other.stepped:
                self.step_optimizer(other)

    def step_optimizer(self, rank: RankState) -> None:
        """The norm is known, and no step during the backward is running: step everything that is left."""
        all_us, least_us, step_us = self.optimizer_us[rank.pp_rank]
        drive_us = self.states_us[rank.pp_rank] if self.states_us else 0.0
        if self.delayed:
            us = max(self.delayed[rank.pp_rank].rest_us, least_us)
            rank.early_us = all_us - us - (self.now - rank.norm_at)
        else:
            us = max(all_us - rank.early_us, drive_us - rank.early_drive_us, least_us)
            left_us = max(drive_us - rank.early_drive_us, 0.0)
            self.host_stepped(rank, "at the end", self.now, step_us - rank.early_us, left_us)
            rank.early_us = max(all_us, drive_us) - us
        rank.finished_at, rank.optimizer_us = self.now + us, us
        if us:
            self.record(rank, "optimizer", "optimizer", self.now, us)

    def record(self, rank: RankState, lane: Lane, name: str, start: float, duration: float) -> None:
        """Add an interval to the trace, if one is kept."""
        if self.events is not None:
            number = self.workload.parallel.global_rank(rank.pp_rank, 0)
            self.events.append(Event(number, lane, name, start, duration))

    def issue_gather(self, rank: RankState, gather: Gather) -> None:
        """Put an unshard into the queue of its first link. For a staged group and for a shard in host memory that is
        the link of host copies: the former leaves its slot over it, the latter crosses it before the all-gather."""
        gather.issued_us = self.now
        link = GPU if gather.route == GPU else CPU
        rank.queues[link].append(gather)
        if gather.flat:
            rank.communicator_of(gather.group).append(GPU)
        self.serve(rank, link)

    def issue_reduce(self, rank: RankState, operation: tuple) -> None:
        """Put the reduction of a group's gradients into its queue."""
        rank.reducing += 1
        rank.queues[REDUCE].append(operation)
        rank.communicator_of(operation[1]).append(REDUCE)
        self.serve(rank, REDUCE)

    def serve(self, rank: RankState, kind: int) -> None:
        """Start the head of a link's queue if the link is idle and nothing holds the head back.

        A ``cpu`` gather waits until its group is published, a ``nvme`` gather until its group is staged in, and a
        stage-in until its slot is empty and its group is published. A collective over a data-parallel communicator
        waits until everything that was issued to the communicator before has ended.
        """
        if rank.active[kind] is not None or not rank.queues[kind]:
            return
        head = rank.queues[kind][0]
        if kind in (GPU, CPU):
            if head.flat and rank.communicator_of(head.group)[0] != GPU:
                return
            if head.route == SHARD:
                size, us = _leg(head, kind)
            elif kind == CPU and head.group not in (rank.published if head.route == CPU else rank.staged):
                return
            else:
                size, us = head.bytes, head.us
            if head.start_us < 0:
                head.start_us = self.now
        elif kind == NVME:
            _, group, slot, size, us = head
            if slot in rank.slot_busy or group not in rank.published:
                return
            rank.slot_busy.add(slot)
        elif kind == REDUCE:
            _, group, size, us, _ = head
            if rank.communicator_of(group)[0] != REDUCE:
                return
        else:
            _, size, us, *_ = head
        rank.queues[kind].popleft()
        if kind == HOST_STEP and not self.delayed and not self._has_room(rank, head[0]):
            self.serve(rank, kind)
            return
        memory = self.host_memory.rate(kind, head, size, us) if self.host_memory is not None else 0.0
        slack = max(us / (head[3] or 1.0), 1.0) if kind == HOST_STEP else 1.0
        rank.active[kind] = Activity(rank, kind, size, us, self.now, head, memory, slack)

    def _shard_leg_ended(self, rank: RankState, kind: int, gather: Gather) -> None:
        """Start the next leg of ``cpu_shard``. Pieces that are copied are gathered while the others are copied; the
        last piece is gathered after the last copy."""
        legs = 1 if gather.pieces == 1 else 2
        if kind == CPU:
            gather.copied += 1
            if gather.copied < legs:
                rank.queues[CPU].appendleft(gather)
            if gather.copied == 1:
                rank.queues[GPU].append(gather)
            elif gather.gathered == 1:
                rank.queues[GPU].appendleft(gather)
        else:
            gather.gathered += 1
            if gather.gathered == legs:
                self.gather_ended(rank, gather)
            elif gather.copied == legs:
                rank.queues[GPU].appendleft(gather)
        self.serve(rank, GPU)
        self.serve(rank, CPU)

    def _added_up(self, rank: RankState, group: int, *, freed: bool = False) -> None:
        """A gradient is reduced and added up in the place where it rests. After its last reduce the host steps the
        group, if there is room for copies of its states. ``freed``: the whole gradient is freed now."""
        rank.reducing -= 1
        if freed:
            self.gradient_freed(rank)
        unit = None if self.early is None else self.early.units.get(group)
        if unit is not None:
            rank.visits[group] = rank.visits.get(group, 0) + 1
            if rank.visits[group] == unit.visits:
                step_us = unit.spared_us if unit.spared_drive_us else unit.us
                rank.queues[HOST_STEP].append((group, unit.bytes, unit.us, step_us, unit.spared_drive_us))
                self.serve(rank, HOST_STEP)
        self.start_optimizer(rank)

    def delay_step(self, rank: RankState) -> None:
        """Start the host's step of a delayed update, once the parameters from before it are published."""
        if self.delayed and len(rank.published) == len(self.publish[rank.pp_rank]):
            step = self.delayed[rank.pp_rank]
            rank.queues[HOST_STEP].append((-1, step.bytes, step.us, step.step_us, step.drive_us))
            self.serve(rank, HOST_STEP)

    def _has_room(self, rank: RankState, group: int) -> bool:
        """Take memory for the copy of a group's states. Returns whether there was enough."""
        assert self.early is not None
        unit = self.early.units[group]
        if rank.early_bytes + unit.saved_bytes > self.early.rollback_bytes:
            return False
        rank.early_bytes += unit.saved_bytes
        rank.early_us += unit.spared_us
        rank.early_drive_us += unit.spared_drive_us
        return True

    def transport_ended(self, rank: RankState, kind: int, activity: Activity, lasted: float) -> None:
        """Start the activities that have waited for this transport."""
        item = activity.item
        if kind == HOST_STEP:
            *_, us, step_us, drive_us = item
            step_us, name = lasted / us * step_us if us else 0.0, "delayed" if self.delayed else str(item[0])
            rank.busy[HOST_STEP] += step_us - lasted
            self.host_stepped(rank, name, activity.started, step_us, drive_us)
        elif self.events is not None:  # only a trace needs names, and most simulations keep none
            begin = item.issued_us if kind == GPU and item.flat else activity.started  # as a run records it
            self.record(rank, KINDS[kind], _name_of(kind, item), begin, self.now - begin)
        if kind in (GPU, CPU):
            if item.flat:
                rank.communicator_of(item.group).popleft()
                self.serve(rank, REDUCE)
            if item.route == SHARD:
                self._shard_leg_ended(rank, kind, item)
                return
            if item.route == NVME:
                rank.staged.discard(item.group)
                rank.slot_busy.discard(item.slot)
                self.serve(rank, NVME)
            self.gather_ended(rank, item)
        elif kind == NVME:
            rank.staged.add(item[1])
            self.serve(rank, CPU)
        elif kind == PUBLISH and len(item) == 4:
            self.gradient_freed(rank)
            rank.queues[HOST_ADD].append((item[0], item[1], item[3]))
            self.serve(rank, HOST_ADD)
        elif kind == PUBLISH:
            rank.published.add(item[0])
            self.delay_step(rank)
            self.serve(rank, CPU)
            self.serve(rank, NVME)
        elif kind == REDUCE:
            code, group, _, _, to_host = item
            rank.communicator_of(group).popleft()
            self.serve(rank, GPU)
            if to_host is None:
                self._added_up(rank, group, freed=code == REDUCE_VISIT)
            else:
                rank.queues[PUBLISH].append((group, *to_host))
                self.serve(rank, PUBLISH)
        elif kind == HOST_ADD:  # one gradient is added at a time; the optimizer waits for the last one
            self._added_up(rank, item[0])
        elif kind == HOST_STEP:
            rank.stepped = bool(self.delayed)
            if rank.norm_at >= 0:
                self.step_optimizer(rank)
        self.serve(rank, kind)


def _leg(gather: Gather, kind: int) -> tuple[int, float]:
    """Bytes and microseconds of the next leg of ``cpu_shard`` over link ``kind``. Each link has two legs: one piece,
    and all other pieces."""
    size, us = (gather.shard_bytes, gather.shard_us) if kind == CPU else (gather.bytes, gather.us)
    if gather.pieces == 1:
        return size, us
    single = gather.copied == 0 if kind == CPU else gather.gathered == 1
    share = (1 if single else gather.pieces - 1) / gather.pieces
    return size, us * share


def _name_of(kind: int, item) -> str:
    """The name of a transport in a trace."""
    if kind in (GPU, CPU):
        return str(item.group)
    if kind in (NVME, REDUCE):
        return str(item[1])
    return f"gradient {item[0]}" if kind == PUBLISH and len(item) == 4 else str(item[0])
