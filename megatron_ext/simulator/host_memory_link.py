"""Host memory as a link: the bytes that copies, publishing, adding and stepping on the host move, and how they share
it.

If the activities of a rank ask for more than its share of the bandwidth, each gets the same part of the rate that it
asks for.
"""

from collections.abc import Sequence

from megatron_ext.simulator.activity_kinds import CPU, HOST_ADD, HOST_STEP, NVME, PUBLISH
from megatron_ext.simulator.rank_state import Activity
from megatron_ext.workload.workload import Workload

STEP_BYTES = 36
"""Bytes that the step of one 16-bit parameter moves: the gradient arrives and is read, three states are read and
written, the new parameter is written and leaves."""


class HostMemoryLink:
    """One rank's share of host memory.

    Attributes:
        publish_passes: by group, bytes that publishing moves for each byte of a shard; 1 for groups that are missing.
    """

    def __init__(self, workload: Workload, bytes_per_us: float):
        self.bytes_per_us, self.publish_passes = bytes_per_us, dict[int, float]()
        dp, settings = workload.parallel.dp, workload.optimizer
        self._shard, self._gradient = 1 / dp, settings.gradient_item_bytes / 2 / dp

    def rate(self, kind: int, item, size_bytes: int, us: float) -> float:
        """Bytes per microsecond that an activity moves while nothing slows it."""
        if not us:
            return 0.0
        if kind == CPU:  # a piece of a shard has the rate of the whole shard
            return item.shard_bytes / item.shard_us if item.shard_us else size_bytes / us
        if kind == NVME:
            return size_bytes / us
        if kind == PUBLISH:
            shares = self._gradient if len(item) == 4 else self._shard * self.publish_passes.get(item[0], 1)
            return size_bytes * shares / us
        if kind == HOST_STEP:
            return size_bytes * STEP_BYTES / 2 * self._shard / us
        return size_bytes * 3 * self._gradient / us if kind == HOST_ADD else 0.0

    def speed(self, running: Sequence[Activity]) -> float:
        """The fraction of its rate that each running activity gets. An activity that waits for a drive asks for a
        higher rate while it moves bytes. If it has to wait for the drive even so, it takes what it needs and the others
        share the rest."""
        left, asked = self.bytes_per_us, sum(activity.memory * activity.slack for activity in running)
        for activity in running:
            if activity.slack > 1.0 and left * activity.slack >= asked:
                left, asked = left - activity.memory, asked - activity.memory * activity.slack
        return left / asked if asked > left else 1.0
