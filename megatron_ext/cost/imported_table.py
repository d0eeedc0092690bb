"""Code that all importers of other tools' logs share: lines, errors, and the cost table that a log becomes."""

import math
import re
from collections.abc import Iterator

import msgspec

from megatron_ext.cost.cost_table import SCHEMA_VERSION, CostTable, Curve, Metadata, check, with_parts
from megatron_ext.formats import json_files
from megatron_ext.formats.errors import InputError

COLLECTIVES = {"all_gather": "routes.gpu", "reduce_scatter": "reduce", "sendrecv": "p2p", "all_reduce": "all_reduce"}
"""By collective, the curve that it becomes. The last curve is only for comparison."""

SIZE_DIGITS = 16
"""Most digits of a size in bytes; ``checks.MOST_BYTES`` has fewer."""


class Log:
    """The lines of a log, without the prefixes of ``mpirun --tag-output`` and ``srun --label``.

    Raises:
        InputError: unreadable, not text, or empty.
    """

    def __init__(self, path):
        self.path, data = path, json_files.read_bytes(path)
        try:
            text = data.decode()
        except UnicodeDecodeError as error:
            raise InputError(f"is not text: {error.reason} at byte {error.start}", file=path) from None
        if not text.strip():
            raise InputError("is empty", file=path)
        self.lines = [re.sub(r"^(\[\d+,\d+\]<std(out|err)>:|\s*\d+: )", "", line) for line in text.split("\n")]

    def find(self, pattern: str) -> Iterator[tuple[int, re.Match]]:
        """Number (from 1) and match of every line that matches ``pattern``."""
        return ((number, match) for number, line in enumerate(self.lines, 1) if (match := re.search(pattern, line)))

    def last(self, **patterns: str) -> dict[str, str]:
        """By name, the group of its pattern in the last line that matches."""
        return {name: match[1] for name, pattern in patterns.items() for _, match in self.find(pattern)}

    def error(self, number: int, message: str) -> InputError:
        """An error that names a line and shows it. After the last line there is nothing to show."""
        line = self.lines[number - 1] if number <= len(self.lines) else ""
        return InputError(message, file=self.path, field=f"line {number}", value=" ".join(line.split()))

    def size(self, number: int, digits: str) -> int:
        """The size in bytes that ``digits`` of a line give.

        Raises:
            InputError: the number is larger than a file may hold; Python and floats may not hold it either.
        """
        if len(digits) > SIZE_DIGITS:
            raise self.error(number, f"is not a plausible size: it has {len(digits)} digits")
        return int(digits)


def finite(text: str) -> float | None:
    """The number in ``text``; None if it is not a finite number."""
    try:
        return value if math.isfinite(value := float(text)) else None
    except ValueError:
        return None


def table_of(path, collective: str, curve: Curve, **metadata) -> CostTable:
    """A table with the curve of one collective, read from the file ``path``."""
    if collective == "reduce_scatter":
        curve = msgspec.structs.replace(curve, counts="gradients")
    return made_of(path, {COLLECTIVES[collective]: curve}, **metadata)


def made_of(path, parts: dict[str, object], **metadata) -> CostTable:
    """A table of ``parts`` by their names, read from the file ``path``."""
    empty = CostTable(schema_version=SCHEMA_VERSION, kind="cost_table", metadata=Metadata(**metadata))
    return check(with_parts(empty, parts), file=path)
