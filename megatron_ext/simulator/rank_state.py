"""The state of one pipeline rank in the engine, and of one activity on it."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from megatron_ext.cost.cost_table import KINDS
from megatron_ext.simulator.rank_programs import RankProgram


class Activity:
    """Work in progress on one link (or the compute) of one rank. Overlapping activities change its rate.

    ``remaining`` is the time that is left, in microseconds of the activity running alone. ``rate`` is how much of that
    passes per microsecond. ``memory``: bytes per microsecond that it moves in host memory when it runs alone.
    ``slack``: its time alone divided by the part that other activities can slow; the rest is waiting for a drive.
    """

    def __init__(
        self, rank: RankState, kind: int, size: int, work: float, now: float, item: Any, memory=0.0, slack=1.0
    ):
        self.rank, self.kind, self.size, self.remaining, self.item = rank, kind, size, work, item
        self.rate, self.updated, self.started, self.version = 0.0, now, now, 0
        self.memory, self.slack = memory, slack


class RankState:
    """A pipeline rank while it is simulated. Times are microseconds since the last optimizer step.

    Attributes:
        index, position: the step in progress, and the next operation in it.
        active, queues, busy: by kind: the activity in progress, the activities that wait for it to end, and the busy
            time so far.
        blocked_on: number of the gather that compute waits for; -1 for none.
        messages: number of messages to or from other ranks that are on their way.
        communicators: for dense groups and for experts, the kinds of collectives that were issued to the data-parallel
            communicator and have not ended, in issue order.
        visits: by group, the number of reduces so far of a gradient that comes and goes.
        whole_gradient, settling: whether a gradient that comes and goes is on its way to its shard, and whether the
            thread waits for it.
        early_bytes: bytes that steps during the backward have taken for copies of states so far.
        early_us: time that these steps save the host's optimizer at the end. When the optimizer has ended: the time by
            which these steps or a delay have shortened it.
        early_drive_us: time that these steps save the drive at the end.
        memory_full, memory_full_us, memory_since: whether activities now ask for more than host memory carries, how
            long they have done so in all, and since when ``memory_full`` has its value.
        optimizer_us: time that the optimizer takes at the end.
        stepped: the step of a delayed update has ended.
        norm_at: when the gradient norm was known; -1 before.
    """

    def __init__(self, program: RankProgram):
        self.program, self.pp_rank = program, program.pp_rank
        self.index, self.position = -1, 0
        self.operations: Sequence[tuple] = ()
        self.steps_done, self.finished_at = False, -1.0
        self.active: list[Activity | None] = [None] * len(KINDS)
        self.queues: list[deque] = [deque() for _ in KINDS]
        self.busy = [0.0] * len(KINDS)
        self.communicators: tuple[deque[int], deque[int]] = deque(), deque()
        self.messages = self.reducing = 0
        self.blocked_on, self.blocked_since = -1, 0.0
        self.exposed = self.compute_us = 0.0
        self.first_start = self.last_end = -1.0
        self.published: set[int] = set()
        self.staged: set[int] = set()
        self.slot_busy: set[int] = set()
        self.whole_gradient = self.settling = False
        self.early_bytes, self.early_us, self.early_drive_us, self.norm_at = 0, 0.0, 0.0, -1.0
        self.visits: dict[int, int] = {}
        self.stepped = self.memory_full = False
        self.memory_full_us = self.memory_since = self.optimizer_us = 0.0

    def communicator_of(self, group: int) -> deque[int]:
        """The communicator of the ranks that share the group's shards."""
        dense, experts = self.communicators
        return experts if group in self.program.experts else dense

    @property
    def step_name(self) -> str:
        """Text form of the step in progress, for example ``3B0``."""
        if not 0 <= self.index < len(self.program.steps):
            return "start"
        stage, backward, microbatch, _ = self.program.steps[self.index]
        return f"{stage}{'B' if backward else 'F'}{microbatch}"
