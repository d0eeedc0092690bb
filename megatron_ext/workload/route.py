"""The routes by which a whole group can reach the device."""

from typing import Literal

ROUTES = ("gpu", "cpu", "nvme")

Route = Literal["gpu", "cpu", "nvme"]
