"""The routes by which a whole group can reach the device."""

from typing import Literal

ROUTES = ("gpu", "cpu", "nvme")

Route = Literal["gpu", "cpu", "nvme"]

HIERARCHICAL = "hierarchical"
"""The algorithm of route ``gpu`` that a schedule can ask for: between nodes first, inside them after.
Other names that a cost table compares are the process group's own affair."""
