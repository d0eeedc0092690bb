"""Logs of nccl-tests (``all_gather_perf`` and its like) as cost curves.

The table's columns are read by their header, since they differ by version and collective:
everything before the first ``time``, then time, algbw, busbw and #wrong for out-of-place and
the same for in-place. ``size`` is the bytes of the whole gathered tensor.
Source: https://github.com/NVIDIA/nccl-tests, src/common.cu.
"""

from __future__ import annotations

import math
import re

from megatron_ext.cost.cost_table import CostTable, Point, Source
from megatron_ext.cost.imported_table import check_rising, line_error, lines_of, named, size_of, table_of
from megatron_ext.formats.errors import InputError

RATE_ERROR = 0.05
"""algbw is size over time: where the two differ by more, the time is in another unit."""


def read(
    path, *, placement: str = "in_place", collective: str | None = None, algorithm: str | None = None
) -> CostTable:
    """Read one log. Raises InputError naming the line that is wrong."""
    lines = lines_of(path)
    header = _header(path, lines)
    rows = _rows(path, lines, header, placement)
    _complete(path, lines, rows)
    check_rising(path, [(number, line, size, us) for number, line, size, us, _ in rows])
    collective = collective or _collective(path, lines, rows)
    points = tuple(Point(size_bytes=size, p50_us=us) for _, _, size, us, _ in rows)
    devices = [match for line in lines if (match := re.match(r"#\s+Rank\s+(\d+).*\[\S+\]\s*(.*)", line))]
    hosts = {match[1] for line in lines if (match := re.match(r"#\s+Rank\s+\d+.*\bon\s+(\S+)\s+device", line))}
    source = (
        f"nccl-tests {collective}_perf, {placement.replace('_', ' ')}, mean times, "
        f"{len(devices) or 'unknown number of'} ranks"
    )
    return table_of(
        path,
        collective,
        named(points, algorithm, source=source),
        source=Source(program="nccl-tests"),
        hardware={"device": devices[0][2].strip(), "devices": len(devices) // max(len(hosts), 1)} if devices else None,
        software=_versions(lines) or None,
        world_sizes={"data_parallel_size": len(devices)} if devices else None,
        notes=(f"{source}: mean times without percentiles",),
    )


def _header(path, lines: list[str]) -> tuple[int, list[str]]:
    """(index of the header line, its columns); the units below it must be B and us."""
    for index, line in enumerate(lines):
        columns = line.lstrip("# ").split()
        if line.startswith("#") and columns[:1] == ["size"] and columns.count("time") == 2:
            units = lines[index + 1] if index + 1 < len(lines) else ""
            found = re.findall(r"\(([^)]*)\)", units)
            if (
                not found
                or found[0] != "B"
                or [unit for unit in found if unit.endswith("s") and "/" not in unit and unit != "elements"]
                != ["us", "us"]
            ):
                raise line_error(path, index + 2, units, "units are not (B) and (us)")
            rates = [unit for unit in found if "/" in unit]
            if any(unit != "GB/s" for unit in rates):
                raise line_error(path, index + 2, units, "rates are not in (GB/s)")
            return index, columns
    raise InputError("no nccl-tests table: no header line '# size ... time ... time' in it", file=path)


def _rows(path, lines: list[str], header: tuple[int, list[str]], placement: str):
    """(number, line, size_bytes, us, redop) of every row with bytes in it."""
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
        rate = _number(path, number, line, cells[time_column + 1], "algbw")
        read = size / us / 1e3
        # algbw is printed with two digits.
        if abs(rate - read) > max(RATE_ERROR * read, 0.006):
            raise line_error(
                path, number, line, f"algbw {rate} GB/s is not {size} bytes in {us} us ({read:.4g} GB/s): another unit?"
            )
        wrong = cells[time_column + 3]
        if wrong not in ("N/A", "0", "0e+00", "0.0"):
            raise line_error(path, number, line, "the collective's results were wrong")
        rows.append((number, line, size, us, cells[columns.index("redop")] if "redop" in columns else "none"))
    if not rows:
        raise InputError("the table has no rows", file=path, field=f"line {index + 2}")
    return rows


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
    if all(row[4] == "none" for row in rows):
        return "all_gather"  # of what we import, only it has no reduction and no peer
    raise line_error(
        path,
        rows[0][0],
        rows[0][1],
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
