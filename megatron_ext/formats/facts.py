"""Facts about a machine or a program: names with plain values."""

from collections.abc import Mapping

Facts = Mapping[str, str | int | float | bool | None]

CAUTION = "caution"
"""In a table's hardware: what its figures are not, in words. A report repeats it."""

NUMA_NODES = "numa_nodes"
"""In a table's hardware: nodes of the machine's memory."""

RANKS_PER_DEVICE = "ranks_per_device"
"""In a table's hardware: how many ranks shared the fullest device. Absent where each had its own."""


def shared_device(ranks: object) -> str:
    """What is said of figures that so many ranks on a device have measured."""
    return (
        f"measured on a shared device ({ranks} ranks on one): figures are not those of a rank with a device of its own"
        ", and compute includes that of the others"
    )
