"""Times of the host's memory and processors from a data sheet, as straight lines in bytes.

[Note: Bytes of the optimizer's step]
AdamW reads a float32 gradient, and reads and writes the main parameter and both moments: 28 bytes per parameter. In
addition, Megatron reads all gradients for their norm, reads and writes them to clip them, writes zeros into their
buffer, and reads the main parameter to write the whole one. In a run's own step, gradients arrive and parameters leave
while other groups are stepped, so the slowest of the three determines the time. Copied bytes cross host memory as well.
"""

from typing import Literal

from megatron_ext.cost.estimated_links import Line, SheetLinks
from megatron_ext.cost.hardware_sheet import HardwareSheet

GRADIENT_BYTES = 4
"""Megatron reduces gradients in float32."""
ADAM_BYTES = 28
CAST_BYTES = 4
"""Reading the main parameter. Writing the new parameter is counted separately."""


class HostWork:
    """Work of one rank on its host while the other ranks of its node do the same.

    Args:
        item: bytes of one whole parameter.

    Attributes:
        memory_bytes_per_s: bytes that this rank's copies and processors together read and write per second.
    """

    def __init__(self, sheet: HardwareSheet, links: SheetLinks, item: int):
        host, ranks = sheet.host, links.ranks_per_node
        self.memory_bytes_per_s = host.memory_bytes_per_s.value / max(ranks, host.numa_nodes.value)
        of_cores = host.cores.value / ranks * host.core_bytes_per_s.value
        self._us_per_byte = 1e6 / min(self.memory_bytes_per_s, of_cores)
        self._adam_us_per_byte = self._us_per_byte / host.adam_efficiency.value
        self._joined_us_per_byte = self._us_per_byte / host.joined_efficiency.value
        link = sheet.host_link
        self._copy = links.host_copy()
        self._pageable = self._copy.scaled(link.efficiency.value / link.pageable_efficiency.value)
        self._per_byte = 1 / item / links.parallel.dp
        self._item, self._call_us = item, sheet.device.kernel_us.value

    def add(self) -> Line:
        """Time to add a float32 gradient shard to another, by bytes of the shard. Two shards are read, one is
        written."""
        return Line(self._call_us, 3 * self._us_per_byte)

    def step(self, cast: Literal["host", "device"]) -> Line:
        """Time of a run's step, by bytes of the whole group: gradients to the host, AdamW, new parameters back."""
        on_host, back = (CAST_BYTES + self._item, self._item) if cast == "host" else (0, GRADIENT_BYTES)
        stepped, copied = (ADAM_BYTES + on_host) * self._joined_us_per_byte, GRADIENT_BYTES + back
        crossed = (ADAM_BYTES + on_host + copied) * 1e6 / self.memory_bytes_per_s
        moved = max(stepped, crossed, max(GRADIENT_BYTES, back) * self._copy.us_per_byte)
        return Line(2 * self._copy.us, moved * self._per_byte)

    def own_step(self) -> Line:
        """Time of Megatron's host optimizer, without its work on the device. Its parts run one after the other. It
        sends float32 parameters back, from memory that is not page-locked."""
        moved = ADAM_BYTES * self._adam_us_per_byte
        moved += GRADIENT_BYTES * (self._copy.us_per_byte + self._pageable.us_per_byte)
        return Line(2 * self._copy.us, moved * self._per_byte)
