"""Other tools' figures as a cost table that says where each of them comes from."""

from __future__ import annotations

import re
from pathlib import Path

from megatron_ext.cost.model import SCHEMA_VERSION, CostTable, Curve, Metadata, Point, Routes, check
from megatron_ext.errors import InputError

FORMATS = ("nccl-tests", "nvbandwidth", "curves")

COLLECTIVES = ("all_gather", "reduce_scatter", "sendrecv", "all_reduce")
"""What a curve of a collective becomes: routes.gpu, reduce, p2p, and a curve to compare by."""

MAX_FALL = 0.15
"""A time may fall by so much from one size to the next larger: small messages waver (10.9 % in
the seed notes' runs). More than that is a broken log."""


def read(
    format: str, path, *, system: str | None = None, placement: str = "in_place", collective: str | None = None, algorithm: str | None = None
) -> CostTable:
    """Read another tool's log into a cost table.

    Args:
        format: one of FORMATS.
        system: of a curves file with several systems, which one.
        placement: ``in_place`` or ``out_of_place``, where both were measured.
        collective: what an nccl-tests log measured, where it does not say.
        algorithm: name the curve, so that tables of several can be combined.

    Raises:
        InputError: the log is broken, in another unit, cut off or empty; the line is named.
    """
    from megatron_ext.cost import curves_file, nccl_tests, nvbandwidth

    if collective is not None and collective not in COLLECTIVES:
        raise InputError(f"known: {', '.join(COLLECTIVES)}", file="--collective", value=collective)
    if format == "nccl-tests":
        return nccl_tests.read(path, placement=placement, collective=collective, algorithm=algorithm)
    if format == "nvbandwidth":
        return nvbandwidth.read(path)
    if format == "curves":
        return curves_file.read(path, system=system, placement=placement)
    raise InputError(f"known formats: {', '.join(FORMATS)}", file="--import", value=format)


def lines_of(path) -> list[str]:
    """The lines of a log. Raises InputError: unreadable, not text, or empty."""
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror}", file=path) from None
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


def check_rising(path, rows: list[tuple[int, str, int, float]]) -> None:
    """Refuse sizes that do not grow and times that fall: rows are (number, line, size_bytes, us).

    Raises:
        InputError: naming the line.
    """
    for (_, _, size, us), (number, line, next_size, next_us) in zip(rows, rows[1:]):
        if next_size <= size:
            raise line_error(path, number, line, f"size {next_size} does not grow from {size}")
        if next_us < us * (1 - MAX_FALL):
            raise line_error(path, number, line, f"time {next_us} us for {next_size} bytes is below {us} us for {size}: not monotone")


def table_of(collective: str, curve: Curve, **metadata) -> CostTable:
    """A table that holds one collective's curve where it belongs."""
    fields = {
        "all_gather": {"routes": Routes(gpu=curve)},
        "reduce_scatter": {"reduce": curve},
        "sendrecv": {"p2p": curve},
        "all_reduce": {"all_reduce": curve},
    }[collective]
    return check(CostTable(schema_version=SCHEMA_VERSION, kind="cost_table", metadata=Metadata(**metadata), **fields))


def named(points: tuple[Point, ...], algorithm: str | None, **fields) -> Curve:
    return Curve(algorithms={algorithm: points}, **fields) if algorithm else Curve(points=points, **fields)
