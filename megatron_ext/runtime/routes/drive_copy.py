"""Route ``nvme``: from the node's copy on the drive, through a staging slot, to the device."""

from functools import partial
from time import perf_counter_ns

from megatron_ext.runtime import drive
from megatron_ext.runtime.flags import poll
from megatron_ext.runtime.group import RankGroup
from megatron_ext.runtime.host_pool import DRIVE
from megatron_ext.runtime.node_copies import NodeCopies
from megatron_ext.runtime.routes.host_copy import CopyRoute
from megatron_ext.runtime.streams import Arrival
from megatron_ext.runtime.worker import LATER, Transfer, Worker


class DriveCopy(CopyRoute):
    """``stage_in`` begins the read into a slot, ``issue`` the copy out of it.

    A slot is filled again only when the copy out of it has ended, which the copy's stream signals with a flag. The copy
    is issued when the slot is full; the issuing thread polls for that. Reads are submitted to the drive without waiting
    for earlier ones. In the trace, each read begins where the previous one ended.
    """

    def __init__(self, copies: NodeCopies):
        assert copies.nvme is not None  # a group has a copy there
        super().__init__("nvme-copy", copies)
        self.pool, self.flags, self.recorder = copies.nvme, copies.pool, copies.recorder
        self.reader = Worker("nvme-read")
        # Number of copies out of each slot so far, including those that are not issued yet.
        self._copied_out = [0] * len(self.pool.copied_out)
        self._staged: dict[int, tuple[int, Transfer]] = {}
        self._read_end = 0

    def stage_in(self, group: RankGroup, slot: int) -> None:
        """Begin to read ``group`` into ``slot`` at the clock's version; returns at once."""
        read = partial(self._read, group, slot, self.clock.version, self._copied_out[slot])
        self._staged[group.index] = slot, self.reader.submit(read)
        self.recorder.moved("gather", "drive_read", drive.aligned(group.bytes))

    def _read(self, group: RankGroup, slot: int, version: int, copied_out: int, transfer: Transfer):
        """Runs on the thread that reads."""
        poll(partial(self.pool.copied_out[slot].reached, copied_out))
        published = partial(self.flags.is_published, group, version, DRIVE)
        poll(published, partial(self.flags.check_published, group, version, DRIVE))
        self.pool.start(group, slot, transfer, partial(self._record, group, perf_counter_ns()))
        return LATER

    def _record(self, group: RankGroup, start: int) -> None:
        end = perf_counter_ns()
        self.recorder.add("nvme", f"stage_in {group.index}", max(start, min(self._read_end, end)), end)
        self._read_end = end

    def issue(self, group: RankGroup) -> Arrival:
        slot, staged = self._staged.pop(group.index)
        self._copied_out[slot] += 1
        arrival = self.arrival(group.index)
        copy = partial(self._copy, group, slot, self._copied_out[slot], staged, arrival)
        self.issuer.when(lambda: staged.ended, copy)
        return arrival

    def _copy(self, group: RankGroup, slot: int, number: int, staged: Transfer, arrival: Arrival) -> None:
        staged.check()
        self.copy(group.whole, self.pool.staged(group, slot), arrival, f"unshard {group.index}")
        self.stream.store(self.pool.copied_out[slot], number)

    def drop(self) -> None:
        """Wait for staged reads that were not used."""
        while self._staged:
            self.issuer.join(self._staged.popitem()[1][1])

    def close(self) -> None:
        self.reader.close()
        super().close()
