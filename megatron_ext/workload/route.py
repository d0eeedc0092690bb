"""The routes by which a whole group can reach the device."""

from typing import Literal

Route = Literal["gpu", "cpu", "cpu_shard", "nvme"]

ROUTES: tuple[Route, ...] = ("gpu", "cpu", "cpu_shard", "nvme")
"""``cpu_shard``: the own shard from host memory, then an all-gather."""

HIERARCHICAL = "hierarchical"
"""The algorithm of route ``gpu`` that a schedule can ask for: between nodes first, inside them after.
Other names that a cost table compares are the process group's own affair."""
