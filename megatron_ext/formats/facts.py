"""Facts about a machine or a program: names with plain values."""

from collections.abc import Mapping

Facts = Mapping[str, str | int | float | bool | None]

CAUTION = "caution"
"""In a table's hardware: what its figures do not stand for, in words. A report repeats the text."""

NUMA_NODES = "numa_nodes"
"""In a table's hardware: number of the machine's NUMA nodes."""

RANKS_PER_DEVICE = "ranks_per_device"
"""In a table's hardware: how many ranks shared the fullest device. Absent if each rank had a device of its own."""


def shared_device(ranks: object) -> str:
    """The caution for figures that were measured with ``ranks`` ranks on one device."""
    return (
        f"measured on a shared device ({ranks} ranks on one): a rank with its own device has other figures, and "
        "compute includes that of the other ranks"
    )
