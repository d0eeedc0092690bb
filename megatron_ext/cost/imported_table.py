"""What all importers of other tools' logs share: lines, their errors, and the cost table that they become."""

import re

import msgspec

from megatron_ext.cost.cost_table import SCHEMA_VERSION, CostTable, Curve, Metadata, Point, check, with_parts
from megatron_ext.formats import json_files
from megatron_ext.formats.errors import InputError

COLLECTIVES = {"all_gather": "routes.gpu", "reduce_scatter": "reduce", "sendrecv": "p2p", "all_reduce": "all_reduce"}
"""By collective, the curve that it becomes; the last is one to compare by."""

MAX_FALL = 0.15
"""A time may fall by so much from one size to the next larger: small messages waver (10.9 % in
the seed notes' runs). More than that is a broken log."""

SIZE_DIGITS = 16
"""Of a size in bytes: more than ``checks.MOST_BYTES`` has."""


def lines_of(path) -> list[str]:
    """The lines of a log. Raises InputError: unreadable, not text, or empty."""
    data = json_files.read_bytes(path)
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise InputError(f"is not text: {error.reason} at byte {error.start}", file=path) from None
    if not text.strip():
        raise InputError("is empty", file=path)
    # What mpirun --tag-output and srun --label put before every line.
    return [re.sub(r"^(\[\d+,\d+\]<std(out|err)>:|\s*\d+: )", "", line) for line in text.split("\n")]


def line_error(path, number: int, line: str, message: str) -> InputError:
    """An error that names a line (counted from 1) and shows it."""
    return InputError(message, file=path, field=f"line {number}", value=" ".join(line.split()))


def size_of(path, number: int, line: str, digits: str) -> int:
    """The size in bytes that ``digits`` say.

    Raises:
        InputError: more than a file may hold; Python and floats may not hold it either.
    """
    if len(digits) > SIZE_DIGITS:
        raise line_error(path, number, line, f"no plausible size: it has {len(digits)} digits")
    return int(digits)


def check_rising(path, rows: list[tuple[int, str, int, float]]) -> None:
    """Refuse sizes that do not grow and times that fall: rows are (number, line, size_bytes, us).

    Raises:
        InputError: naming the line.
    """
    for (_, _, size, us), (number, line, next_size, next_us) in zip(rows, rows[1:]):
        if next_size <= size:
            raise line_error(path, number, line, f"size {next_size} does not grow from {size}")
        if next_us < us * (1 - MAX_FALL):
            raise line_error(
                path, number, line, f"time {next_us} us for {next_size} bytes is below {us} us for {size}: not monotone"
            )


def table_of(path, collective: str, curve: Curve, **metadata) -> CostTable:
    """A table that holds one collective's curve, of the file ``path``, where it belongs."""
    if collective == "reduce_scatter":
        curve = msgspec.structs.replace(curve, counts="gradients")
    return made_of(path, {COLLECTIVES[collective]: curve}, **metadata)


def made_of(path, parts: dict[str, object], **metadata) -> CostTable:
    """A table of ``parts`` by their names, of the file ``path``."""
    empty = CostTable(schema_version=SCHEMA_VERSION, kind="cost_table", metadata=Metadata(**metadata))
    return check(with_parts(empty, parts), file=path)


def named(points: tuple[Point, ...], algorithm: str | None, **fields) -> Curve:
    return Curve(algorithms={algorithm: points}, **fields) if algorithm else Curve(points=points, **fields)
