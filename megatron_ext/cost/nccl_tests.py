"""Logs of nccl-tests (``all_gather_perf`` and its like) as cost curves.

The table's columns are read by their header, since they differ by version and collective:
everything before the first ``time``, then time, algbw, busbw and #wrong for out-of-place and
the same for in-place. ``size`` is the bytes of the whole gathered tensor.
Until 2022 the last of them is ``error``, the largest difference from the result that was expected: reductions have
some, and the summary says whether it is too much. Until June 2020 algbw of all_gather and reduce_scatter leaves out the
part that a rank has, and is busbw (commit ec1b5e2).
Source: https://github.com/NVIDIA/nccl-tests, src/common.cu, src/all_gather.cu.
"""

import math
import re
from typing import NamedTuple

from megatron_ext.cost.cost_table import CostTable, Point, Source
from megatron_ext.cost.imported_table import COLLECTIVES, check_rising, line_error, lines_of, named, size_of, table_of
from megatron_ext.formats.errors import InputError

RATE_ERROR = 0.05
"""algbw is size over time: where the two differ by more, the time is in another unit."""


class Row(NamedTuple):
    """One line of the table; ``us`` and the rates (GB/s) of the placement that is read."""

    number: int
    line: str
    size: int
    us: float
    algbw: float
    busbw: float
    redop: str


def read(
    path, *, placement: str = "in_place", collective: str | None = None, algorithm: str | None = None
) -> CostTable:
    """Read one log. Raises InputError naming the line that is wrong.

    Args:
        placement: ``in_place`` or ``out_of_place``.
        collective: what was measured, where the log does not say.
        algorithm: name the curve, so that tables of several can be combined.
    """
    if collective is not None and collective not in COLLECTIVES:
        raise InputError(f"known: {', '.join(COLLECTIVES)}", file="--collective", value=collective)
    lines = lines_of(path)
    header = _header(path, lines)
    rows = _rows(path, lines, header, placement)
    _complete(path, lines, rows)
    devices = _devices(path, lines)
    check_rising(path, [row[:4] for row in rows])
    collective = collective or _collective(path, lines, rows)
    points = tuple(Point(size_bytes=row.size, p50_us=row.us) for row in rows)
    hosts = {match[1] for _, line in devices if (match := re.search(r"\bon\s+(\S+)\s+device", line))}
    ranks, whole = _ranks(rows, collective, len(devices))
    source = (
        f"nccl-tests {collective}_perf, {placement.replace('_', ' ')}, mean times, {ranks or 'unknown number of'} ranks"
    )
    notes = [f"{source}: mean times without percentiles"]
    if not whole:
        notes.append(f"{len(devices)} devices are listed, and busbw is that of {ranks or 'another number of'} ranks")
    hardware = {"device": devices[0][0], "devices": len(devices) // max(len(hosts), 1)} if devices else None
    if hardware is not None and not whole:
        del hardware["devices"]
    return table_of(
        path,
        collective,
        named(points, algorithm, source=source),
        source=Source(program="nccl-tests"),
        hardware=hardware,
        software=_versions(lines) or None,
        world_sizes={"data_parallel_size": ranks} if ranks else None,
        notes=tuple(notes),
    )


def _devices(path, lines: list[str]) -> list[tuple[str, str]]:
    """(name, line) of every device that is listed. Raises InputError where the log is of several runs."""
    devices, seen = [], set()
    for number, line in enumerate(lines, 1):
        if match := re.match(r"#\s+Rank\s+(\d+).*\[\S+\]\s*(.*)", line):
            if match[1] in seen:
                why = f"rank {match[1]} is listed twice: several runs in one log, or processes started without MPI"
                raise line_error(path, number, line, why)
            seen.add(match[1])
            devices.append((match[2].strip(), line))
    return devices


def _ranks(rows: list[Row], collective: str, listed: int) -> tuple[int | None, bool]:
    """How many ranks took part, None where nothing says it; and whether so many devices are listed, or none.

    Lists are often shortened when logs are shown to others. busbw is algbw times a factor that the number of ranks
    gives (nccl-tests, doc/PERFORMANCE.md), as exactly as two digits say it.
    """
    row = max(rows, key=lambda row: row.algbw)
    twice = 2 if collective == "all_reduce" else 1
    without_own = row.algbw == row.busbw and twice == 1  # before June 2020
    base = row.size / row.us / 1e3 if without_own else row.algbw
    left = twice - row.busbw / base if base else 0.0
    if collective == "sendrecv" or left <= 0:
        return listed or None, True
    ranks, digits = twice / left, 0.02 / base + (0.1 / row.us if without_own else 0.0)
    uncertain = ranks**2 / twice * digits
    if not listed or abs(ranks - listed) > uncertain + 0.5:
        return (round(ranks) if uncertain < 0.4 else None), not listed
    return listed, True


def _header(path, lines: list[str]) -> tuple[int, list[str]]:
    """(index of the header line, its columns); the units below it must be B and us."""
    for index, line in enumerate(lines):
        columns = line.lstrip("# ").split()
        if line.startswith("#") and columns[:1] == ["size"] and columns.count("time") == 2:
            units = lines[index + 1] if index + 1 < len(lines) else ""
            found = re.findall(r"\(([^)]*)\)", units)
            times = [unit for unit in found if unit.endswith("s") and "/" not in unit and unit != "elements"]
            if found[:1] != ["B"] or times != ["us", "us"]:
                raise line_error(path, index + 2, units, "units are not (B) and (us)")
            rates = [unit for unit in found if "/" in unit]
            if any(unit != "GB/s" for unit in rates):
                raise line_error(path, index + 2, units, "rates are not in (GB/s)")
            return index, columns
        if line.startswith("#") and columns[:2] == ["bytes", "N"]:
            raise line_error(
                path,
                index + 1,
                line,
                "a table of nccl-tests before April 2019: times in ms, too coarse; run a newer one",
            )
    raise InputError("no nccl-tests table: no header line '# size ... time ... time' in it", file=path)


def _rows(path, lines: list[str], header: tuple[int, list[str]], placement: str) -> list[Row]:
    """Every row with bytes in it."""
    index, columns = header
    first = columns.index("time")
    time_column = first + (columns[first + 1 :].index("time") + 1 if placement == "in_place" else 0)
    rows = []
    for number, line in enumerate(lines[index + 2 :], index + 3):
        if line.startswith("#") or not line.strip():
            continue
        cells = line.split()
        if not re.fullmatch(r"\d+", cells[0]):
            if rows and re.match(r"[\d.]+\s", line.strip()):
                raise line_error(path, number, line, "size is not a whole number of bytes")
            continue  # other programs write into logs too
        if len(cells) != len(columns):
            raise line_error(path, number, line, f"{len(cells)} columns where the header has {len(columns)}: cut off")
        size, us = size_of(path, number, line, cells[0]), _number(path, number, line, cells[time_column], "time")
        if size == 0:
            continue  # fewer bytes than ranks: nothing was sent
        if us <= 0:
            raise line_error(path, number, line, "time must be positive")
        algbw, busbw = (_number(path, number, line, cells[time_column + 1 + n], ("algbw", "busbw")[n]) for n in (0, 1))
        if "error" not in columns and cells[time_column + 3] not in ("N/A", "0", "0e+00", "0.0"):
            raise line_error(path, number, line, "the collective's results were wrong")
        redop = cells[columns.index("redop")] if "redop" in columns else "none"
        rows.append(Row(number, line, size, us, algbw, busbw, redop))
    if not rows:
        raise InputError("the table has no rows", file=path, field=f"line {index + 2}")
    failed = [(number, line) for number, line in enumerate(lines, 1) if re.match(r"# Out of bounds.*FAILED", line)]
    if failed:
        raise line_error(path, *failed[0], "the collective's results were wrong")
    _check_rates(path, rows, "error" in columns)
    return rows


def _check_rates(path, rows: list[Row], old: bool) -> None:
    """algbw is printed with two digits; in ``old`` tables it may leave out the part that a rank has."""
    left_out = 0.0
    if old and all(row.algbw == row.busbw for row in rows):
        largest = max(rows, key=lambda row: row.algbw)
        share = 1 - largest.algbw * largest.us * 1e3 / largest.size
        # Of n ranks each has one n-th; two have most.
        left_out = 1 / round(1 / share) if RATE_ERROR < share < 0.6 else 0.0
    for row in rows:
        read = row.size * (1 - left_out) / row.us / 1e3
        if abs(row.algbw - read) > max(RATE_ERROR * read, 0.006):
            said = f"{row.size} bytes in {row.us} us ({read:.4g} GB/s)"
            raise line_error(path, row.number, row.line, f"algbw {row.algbw} GB/s is not {said}: another unit?")


def _number(path, number: int, line: str, text: str, what: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise line_error(path, number, line, f"{what} {text} is not a number")
    return value


def _complete(path, lines: list[str], rows) -> None:
    """A whole log has its summary, or has reached its own maxBytes in a whole line."""
    if any(line.startswith(("# Avg bus bandwidth", "# Out of bounds values")) for line in lines):
        return
    last_number, last_line, last_size = rows[-1][:3]
    largest = next(
        (
            size_of(path, number, line, match[1])
            for number, line in enumerate(lines, 1)
            if (match := re.search(r"\bmaxBytes\s+(\d+)", line))
        ),
        None,
    )
    if largest is None or last_size * 2 <= largest or lines[-1].strip():
        raise line_error(
            path, last_number, last_line, "the log ends here, without its summary line '# Avg bus bandwidth': cut off"
        )


def _collective(path, lines: list[str], rows) -> str:
    text = "\n".join(lines)
    match = re.search(r"\b(all_gather|reduce_scatter|sendrecv|all_reduce)_perf\b", text)
    if match:
        return match[1]
    if all(row.redop == "none" for row in rows):
        return "all_gather"  # of what we import, only it has no reduction and no peer
    raise line_error(
        path,
        rows[0].number,
        rows[0].line,
        "a reduction, and the log does not name its program: say --collective all_reduce or reduce_scatter",
    )


def _versions(lines: list[str]) -> dict[str, str]:
    found = {}
    for line in lines:
        if match := re.search(r"NCCL version\s+([\d.]+)", line):
            found["nccl"] = match[1]
        if match := re.search(r"nccl-tests version\s+([\d.]+)", line):
            found["nccl_tests"] = match[1]
    return found
