"""Facts about a machine or a program: names with plain values."""

from collections.abc import Mapping

Facts = Mapping[str, str | int | float | bool | None]

EMULATED = "EMULATED links"
"""In a device's name: its links are slowed, so no figure is of this machine's own."""
