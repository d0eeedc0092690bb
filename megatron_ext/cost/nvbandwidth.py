"""Logs of nvbandwidth as cost curves: host copies, write-back, and both at once.

nvbandwidth reports rates at one buffer size, without latency, so each curve has one point:
other sizes are extrapolated at the same rate, and only where that is asked for.
Source: https://github.com/NVIDIA/nvbandwidth.
"""

from __future__ import annotations

import math
import re
from statistics import median

from megatron_ext.cost.cost_table import (
    SCHEMA_VERSION,
    Contention,
    CostTable,
    Curve,
    Metadata,
    Point,
    Publish,
    Routes,
    Source,
    check,
)
from megatron_ext.cost.imported_table import line_error, lines_of, size_of
from megatron_ext.formats.errors import InputError

BUFFER_BYTES = 512 << 20
"""nvbandwidth's default ``--bufferSize``, where the log does not say another."""

TO_DEVICE = ("host_to_all_memcpy_ce", "host_to_device_memcpy_ce")
TO_HOST = ("all_to_host_memcpy_ce", "device_to_host_memcpy_ce")
"""All devices at once is what a run does; one at a time only where that is missing."""

PAIRS = (
    ("cpu", "publish", "host_to_device_bidirectional_memcpy_ce", "host_to_device_memcpy_ce"),
    ("publish", "cpu", "device_to_host_bidirectional_memcpy_ce", "device_to_host_memcpy_ce"),
)
"""(measured, busy, test in both directions, the same test alone)."""


READ = {*TO_DEVICE, *TO_HOST, *(name for pair in PAIRS for name in pair[2:])}


def read(path) -> CostTable:
    """Read one log. Raises InputError naming the line that is wrong."""
    lines = lines_of(path)
    tests = _tests(path, lines)
    size = _buffer_bytes(path, lines)
    devices = [match[1].strip() for line in lines if (match := re.match(r"\s*Device \d+:\s*(.*)", line))]
    count = len(devices) or max(len(rates) for rates in tests.values())

    def curve(names: tuple[str, ...], size_bytes: int, copied: int) -> Curve | None:
        name = next((name for name in names if name in tests), None)
        if name is None:
            return None
        us = [copied / rate / 1e3 for rate in tests[name]]
        point = Point(size_bytes=size_bytes, p50_us=median(us), p95_us=max(us), samples=len(us))
        return Curve(points=(point,), source=f"nvbandwidth {name}, {len(us)} devices, one buffer size")

    cpu = curve(TO_DEVICE, size, size)
    # A rank writes back its shard: of a group of (devices * buffer) bytes, one buffer.
    publish = curve(TO_HOST, size * count, size)
    if cpu is None and publish is None:
        raise InputError(f"has none of the tests {', '.join(TO_DEVICE + TO_HOST)}", file=path)
    contention = tuple(
        Contention(measured=measured, busy=busy, slowdown=median(tests[alone]) / median(tests[both]), size_bytes=size)
        for measured, busy, both, alone in PAIRS
        if both in tests and alone in tests
    )
    return check(
        CostTable(
            schema_version=SCHEMA_VERSION,
            kind="cost_table",
            metadata=Metadata(
                source=Source(program="nvbandwidth", description=f"tests {', '.join(sorted(tests))}"),
                hardware={"device": devices[0], "devices": len(devices)} if devices else None,
                software=_versions(lines) or None,
                notes=("nvbandwidth: rates at one buffer size, without latency; other sizes are extrapolated",),
            ),
            routes=Routes(cpu=cpu),
            publish=Publish(cpu=publish),
            contention=contention,
        ),
        file=path,
    )


def _tests(path, lines: list[str]) -> dict[str, list[float]]:
    """GB/s of every device (or pair), by test."""
    tests: dict[str, list[float]] = {}
    name, start, rates, unit_seen = None, 0, [], False
    for number, line in enumerate(lines, 1):
        if match := re.match(r"Running (\w+?)\.?\s*$", line):
            if name is not None:
                raise line_error(path, start, lines[start - 1], "this test ends without its SUM line: cut off")
            # Other tests print other things (several matrices, latencies): they are passed over.
            name = match[1] if match[1] in READ else None
            start, rates, unit_seen = number, [], False
        elif name is None:
            continue
        elif "WAIVED" in line or line.startswith(f"Waived: {name}"):
            name = None
        elif "bandwidth (" in line:
            if "(GB/s)" not in line:
                raise line_error(path, number, line, "rates are not in (GB/s)")
            unit_seen = True
        elif match := re.match(rf"(SUM|MIN|MAX|AVG|MEDIAN) {name}\s+(\S+)", line):
            if not rates or not unit_seen:
                raise line_error(path, number, line, "a sum without rates in (GB/s) above it")
            total = _rate(path, number, line, match[2])
            if match[1] == "SUM" and abs(total - sum(rates)) > 0.01 * total + 0.01 * len(rates):
                raise line_error(
                    path, number, line, f"the rates above it add up to {sum(rates):.2f}: a part is missing"
                )
            tests[name], name = rates, None
        elif unit_seen and re.match(r"\s*\d+\s+(N/A|-?\d+\.\d|nan|inf)", line):  # a row: its index, then rates
            rates += [_rate(path, number, line, text) for text in line.split()[1:] if text != "N/A"]
    if name is not None:
        raise line_error(path, start, lines[start - 1], "this test ends without its SUM line: cut off")
    if start and not any(line.strip() for line in lines[start:]):  # also in the middle of a test's name
        raise line_error(path, start, lines[start - 1], "the log ends where this test begins: cut off")
    if not tests:
        raise InputError("no nvbandwidth results: no line 'Running <test>.' with its SUM in it", file=path)
    return tests


def _rate(path, number: int, line: str, text: str) -> float:
    try:
        rate = float(text)
    except ValueError:
        rate = math.nan
    if not math.isfinite(rate) or rate <= 0:
        raise line_error(path, number, line, f"rate {text} must be a positive number")
    return rate


def _buffer_bytes(path, lines: list[str]) -> int:
    for number, line in enumerate(lines, 1):
        if match := re.search(r"[Bb]uffer ?[Ss]ize[:= ]+(\d+)\s*(MiB|MB)?", line):
            return size_of(path, number, line, match[1]) << 20
    return BUFFER_BYTES


def _versions(lines: list[str]) -> dict[str, str]:
    patterns = {
        "nvbandwidth": r"nvbandwidth Version:\s*(\S+)",
        "driver": r"^Driver Version:\s*(\S+)",
        "cuda": r"CUDA Runtime Version:\s*(\S+)",
    }
    return {
        name: match[1] for name, pattern in patterns.items() for line in lines if (match := re.search(pattern, line))
    }
