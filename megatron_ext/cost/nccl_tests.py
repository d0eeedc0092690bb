"""Logs of nccl-tests (``all_gather_perf`` and the like) as cost curves.

The table's columns are found by their header, since they differ by version and collective:
everything before the first ``time``, then time, algbw, busbw and #wrong for out-of-place and
the same for in-place. ``size`` is the bytes of the whole gathered tensor.
Until 2022 the last column is ``error``, the largest difference from the expected result: reductions have
such differences, and the summary says whether they are too large. Logs from before June 2020 are not read: there the
algbw of all_gather and reduce_scatter leaves out the part that a rank already has (commit ec1b5e2).
Source: https://github.com/NVIDIA/nccl-tests, src/common.cu, src/all_gather.cu.
"""

import re
from itertools import pairwise
from typing import NamedTuple

from megatron_ext.cost.cost_table import CostTable, Curve, Point, Source
from megatron_ext.cost.imported_table import COLLECTIVES, Log, finite, table_of
from megatron_ext.formats.errors import InputError

RATE_ERROR = 0.05
"""algbw is size over time. If the two differ by more than this, the time is in another unit."""

MAX_FALL = 0.15
"""A time may fall by this share from one size to the next larger, because times of small messages scatter (10.9 % was
seen). A log in which a time falls further is broken."""


class LogRow(NamedTuple):
    """One line of the table, with the time (``us``) and the rates (GB/s) of operations in place."""

    number: int
    size: int
    us: float
    algbw: float
    busbw: float
    redop: str


def read(path, *, collective: str | None = None) -> CostTable:
    """Read the times of operations in place from one log, because Megatron gathers in place. Raises InputError naming
    the line that is wrong.

    Args:
        collective: what was measured, if the log does not say.
    """
    if collective is not None and collective not in COLLECTIVES:
        raise InputError(f"known: {', '.join(COLLECTIVES)}", file="--collective", value=collective)
    log = Log(path)
    rows = _rows(log)
    _check_complete(log, rows)
    devices = _devices(log)
    _check_rising(log, rows)
    collective = collective or _collective(log, rows)
    points = tuple(Point(size_bytes=row.size, p50_us=row.us) for row in rows)
    ranks, whole = _ranks(rows, collective, len(devices))
    source = f"nccl-tests {collective}_perf, in place, mean times, {ranks or 'unknown number of'} ranks"
    notes = [f"{source}: mean times without percentiles"]
    hardware: dict | None = {"device": devices[0][1]} if devices else None
    if not whole:
        notes.append(f"{len(devices)} devices are listed, but busbw is that of {ranks or 'another number of'} ranks")
    elif hardware is not None:
        hardware["devices"] = len(devices) // max(len({host for host, _ in devices if host}), 1)
    return table_of(
        path,
        collective,
        Curve(points=points, source=source),
        source=Source(program="nccl-tests"),
        hardware=hardware,
        software=log.last(nccl_tests=r"nccl-tests version\s+([\d.]+)", nccl=r"NCCL version\s+([\d.]+)") or None,
        world_sizes={"data_parallel_size": ranks} if ranks else None,
        notes=tuple(notes),
    )


def _devices(log: Log) -> list[tuple[str | None, str]]:
    """(host, name) of every device that is listed. Raises InputError if the log holds several runs."""
    devices = {}
    for number, match in log.find(r"^#\s+Rank\s+(\d+)(?:.*?\bon\s+(\S+)\s+device)?.*\[\S+\]\s*(.*)"):
        if match[1] in devices:
            why = f"rank {match[1]} is listed twice: several runs in one log, or processes started without MPI"
            raise log.error(number, why)
        devices[match[1]] = match[2], match[3].strip()
    return list(devices.values())


def _ranks(rows: list[LogRow], collective: str, listed: int) -> tuple[int | None, bool]:
    """How many ranks took part (None if the log does not show it), and whether that many devices, or none, are listed.

    Device lists are often shortened when logs are published. busbw is algbw times a factor that depends on the number
    of ranks (nccl-tests, doc/PERFORMANCE.md), so the two give this number as exactly as their two digits allow.
    """
    row = max(rows, key=lambda row: row.algbw)
    twice = 2 if collective == "all_reduce" else 1
    left = twice - row.busbw / row.algbw if row.algbw else 0.0
    if collective == "sendrecv" or left <= 0:
        return listed or None, True
    ranks = twice / left
    uncertain = ranks**2 / twice * 0.02 / row.algbw
    if not listed or abs(ranks - listed) > uncertain + 0.5:
        return (round(ranks) if uncertain < 0.4 else None), not listed
    return listed, True


def _header(log: Log) -> tuple[int, list[str]]:
    """(number of the line below the header, the header's columns). That line holds the units; they must be B and us."""
    for number, line in enumerate(log.lines, 1):
        columns = line.lstrip("# ").split()
        if line.startswith("#") and columns[:1] == ["size"] and columns.count("time") == 2:
            found = re.findall(r"\(([^)]*)\)", "".join(log.lines[number : number + 1]))
            times = [unit for unit in found if unit.endswith("s") and "/" not in unit and unit != "elements"]
            if found[:1] != ["B"] or times != ["us", "us"]:
                raise log.error(number + 1, "units are not (B) and (us)")
            if any("/" in unit and unit != "GB/s" for unit in found):
                raise log.error(number + 1, "rates are not in (GB/s)")
            return number + 1, columns
        if line.startswith("#") and columns[:2] == ["bytes", "N"]:
            why = "a table of nccl-tests before April 2019, whose times in ms are too coarse; run a newer version"
            raise log.error(number, why)
    raise InputError("no nccl-tests table: no header line '# size ... time ... time' in it", file=log.path)


def _rows(log: Log) -> list[LogRow]:
    """Every row with bytes in it."""
    units, columns = _header(log)
    time_column = columns.index("time", columns.index("time") + 1)  # behind the one out of place
    rows = []
    for number, line in enumerate(log.lines[units:], units + 1):
        if line.startswith("#") or not line.strip():
            continue
        cells = line.split()
        if not re.fullmatch(r"\d+", cells[0]):
            if rows and re.match(r"[\d.]+\s", line.strip()):
                raise log.error(number, "size is not a whole number of bytes")
            continue  # other programs write into logs too
        if len(cells) != len(columns):
            raise log.error(number, f"{len(cells)} columns where the header has {len(columns)}: cut off")
        size, us = log.size(number, cells[0]), _figure(log, number, cells[time_column], "time")
        if size == 0:
            continue  # fewer bytes than ranks: nothing was sent
        if us <= 0:
            raise log.error(number, "time must be positive")
        algbw, busbw = (_figure(log, number, cells[time_column + n], what) for n, what in ((1, "algbw"), (2, "busbw")))
        if "error" not in columns and cells[time_column + 3] not in ("N/A", "0", "0e+00", "0.0"):
            raise log.error(number, "the collective's results were wrong")
        redop = cells[columns.index("redop")] if "redop" in columns else "none"
        rows.append(LogRow(number, size, us, algbw, busbw, redop))
    if not rows:
        raise InputError("the table has no rows", file=log.path, field=f"line {units}")
    for number, _ in log.find(r"^# Out of bounds.*FAILED"):
        raise log.error(number, "the collective's results were wrong")
    _check_rates(log, rows)
    return rows


def _check_rates(log: Log, rows: list[LogRow]) -> None:
    """Check that algbw (two digits) is size over time."""
    for row in rows:
        read = row.size / row.us / 1e3
        if abs(row.algbw - read) > max(RATE_ERROR * read, 0.006):
            said = f"algbw {row.algbw} GB/s is not {row.size} bytes in {row.us} us ({read:.4g} GB/s)"
            raise log.error(row.number, f"{said}: is it in another unit, or from before June 2020?")


def _check_rising(log: Log, rows: list[LogRow]) -> None:
    """Refuse sizes that do not grow and times that fall."""
    for row, after in pairwise(rows):
        if after.size <= row.size:
            raise log.error(after.number, f"size {after.size} does not grow from {row.size}")
        if after.us < row.us * (1 - MAX_FALL):
            said = f"time {after.us} us for {after.size} bytes is below {row.us} us for {row.size}: not monotone"
            raise log.error(after.number, said)


def _figure(log: Log, number: int, text: str, what: str) -> float:
    if (value := finite(text)) is None:
        raise log.error(number, f"{what} {text} is not a number")
    return value


def _check_complete(log: Log, rows: list[LogRow]) -> None:
    """Refuse a log that is cut off. A complete log has its summary, or its last whole line has reached its maxBytes."""
    if any(log.find(r"^# (Avg bus bandwidth|Out of bounds values)")):
        return
    largest = next((log.size(number, match[1]) for number, match in log.find(r"\bmaxBytes\s+(\d+)")), None)
    if largest is None or rows[-1].size * 2 <= largest or log.lines[-1].strip():
        raise log.error(rows[-1].number, "the log ends here, without its summary line '# Avg bus bandwidth': cut off")


def _collective(log: Log, rows: list[LogRow]) -> str:
    for _, match in log.find(r"\b(all_gather|reduce_scatter|sendrecv|all_reduce)_perf\b"):
        return match[1]
    if all(row.redop == "none" for row in rows):
        return "all_gather"  # the only imported collective with neither a reduction nor a peer
    why = "a reduction, and the log does not name its program: give --collective all_reduce or reduce_scatter"
    raise log.error(rows[0].number, why)
