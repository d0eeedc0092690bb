"""Checks of the values in a user's file. Each failure is one line with file, field and value."""

import math
from typing import NoReturn

from megatron_ext.formats.errors import InputError

LEAST_US, MOST_US = 1e-12, 1e13
"""Shortest and longest time that a file may hold. Simulated times, which are sums and products of these and of sizes up
to :data:`MOST_BYTES`, are finite."""

MOST_BYTES = 1 << 50
"""Largest size that a file may hold."""


class Checker:
    """Raises ``error`` for the values of one file.

    Args:
        file: path named in the message, or None.
        error: the class to raise; it takes the arguments of :class:`InputError`.
    """

    def __init__(self, file=None, error: type[InputError] = InputError):
        self.file, self.error = file, error

    def refuse(self, message: str, field: str | None = None, value: object = ...) -> NoReturn:
        """Raise the error; its message names the file."""
        raise self.error(message, file=self.file, field=field, value=value)

    def at_least(self, least: int, value: float | None, field: str | None = None) -> None:
        """Refuse a ``value`` below ``least``; None passes."""
        if value is not None and value < least:
            self.refuse(f"must be at least {least}" if least else "must not be negative", field, value)

    def positive(self, value: float | None, field: str, *, zero: bool = False) -> None:
        """Refuse a ``value`` that is not finite and above 0 (at least 0 with ``zero``); None passes."""
        if value is not None and (not math.isfinite(value) or value < 0 or (value == 0 and not zero)):
            self.refuse("must be a positive, finite number", field, value)

    def duration(self, value: float | None, field: str, *, zero: bool = False) -> None:
        """Refuse a ``value`` that is not a plausible time in microseconds (or 0 with ``zero``); None passes."""
        self.positive(value, field, zero=zero)
        if value and not LEAST_US <= value <= MOST_US:
            self.refuse(f"is not a plausible time: expected {LEAST_US:g} to {MOST_US:g} us", field, value)

    def size(self, value: int | None, field: str | None = None) -> None:
        """Refuse a ``value`` that is not a plausible number of bytes; None passes."""
        self.at_least(0, value, field)
        if value is not None and value > MOST_BYTES:
            self.refuse(f"is not a plausible size: expected at most {MOST_BYTES} bytes", field, value)

    def not_below(self, other: str, least: float, value: float | None, field: str) -> None:
        """Refuse a ``value`` below ``least``, which is the value of field ``other``; None passes."""
        if value is not None and value < least:
            self.refuse(f"is below {other}", field, value)
