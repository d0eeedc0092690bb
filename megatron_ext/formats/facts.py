"""Facts about a machine or a program: names with plain values."""

from collections.abc import Mapping

Facts = Mapping[str, str | int | float | bool | None]
