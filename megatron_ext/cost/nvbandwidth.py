"""Logs of nvbandwidth as cost curves: host copies, publishing, and both at once.

nvbandwidth reports rates at one buffer size, without latency, so each curve has one point.
Other sizes are extrapolated at the same rate, and only on request. Both its text and its JSON (``--json``) are read.
Tests of copies by kernels (``_sm``) are ignored, because routes copy with the copy engine (``_ce``).
Source: https://github.com/NVIDIA/nvbandwidth, output.cpp, json_output.cpp.
"""

import re
from collections.abc import Callable
from functools import partial
from itertools import chain
from statistics import median
from typing import NamedTuple

import msgspec

from megatron_ext.cost.cost_table import Contention, CostTable, Curve, Point, Source
from megatron_ext.cost.imported_table import Log, finite, made_of
from megatron_ext.formats.errors import InputError

BUFFER_BYTES = 512 << 20
"""nvbandwidth's default ``--bufferSize``, used if the log does not say another."""

TO_DEVICE = ("host_to_all_memcpy_ce", "host_to_device_memcpy_ce")
TO_HOST = ("all_to_host_memcpy_ce", "device_to_host_memcpy_ce")
"""Tests of all devices at once come first, because a run copies to all of them. Tests of one device at a time are used
only if these are missing."""

PAIRS = (
    ("cpu", "publish", "host_to_device_bidirectional_memcpy_ce", "host_to_device_memcpy_ce"),
    ("publish", "cpu", "device_to_host_bidirectional_memcpy_ce", "device_to_host_memcpy_ce"),
)
"""(measured, busy, test with copies in both directions, the same test in one direction)."""

READ = {*TO_DEVICE, *TO_HOST, *(name for pair in PAIRS for name in pair[2:])}

WITHOUT_SUM = "this test ends without its SUM line: cut off"


class Rates(NamedTuple):
    """Contents of a log: GB/s of every device (or pair) for each test that is read, names of all tests that have run,
    devices, versions, bytes of the buffer."""

    tests: dict[str, list[float]]
    found: list[str]
    devices: list[str]
    versions: dict[str, str]
    size: int


def read(path) -> CostTable:
    """Read one log. Raises InputError naming the line that is wrong, or the test that has to be run."""
    log = Log(path)
    text = "\n".join(log.lines).strip()
    tests, found, devices, versions, size = _of_json(path, text) if text.startswith("{") else _of_text(log)
    if not any(name in tests for name in TO_DEVICE + TO_HOST):
        found = f"holds {', '.join(found)} but no" if found else "no nvbandwidth results: it holds no finished"
        tests_to_run = f"{TO_DEVICE[1]} {TO_HOST[1]} {PAIRS[0][2]}"
        why = f"{found} copy of host memory with the copy engine; run `nvbandwidth -t {tests_to_run}`"
        raise InputError(why, file=path)
    count = len(devices) or max(len(rates) for rates in tests.values())

    def curve(names: tuple[str, ...], size_bytes: int, copied: int) -> Curve | None:
        name = next((name for name in names if name in tests), None)
        if name is None:
            return None
        us = [copied / rate / 1e3 for rate in tests[name]]
        point = Point(size_bytes=size_bytes, p50_us=median(us), p95_us=max(us), samples=len(us))
        return Curve(points=(point,), source=f"nvbandwidth {name}, {len(us)} devices, one buffer size")

    cpu = curve(TO_DEVICE, size, size)
    # A rank publishes its shard: one buffer of a group of (devices * buffer) bytes.
    publish = curve(TO_HOST, size * count, size)
    notes = ["nvbandwidth: rates at one buffer size, without latency; other sizes are extrapolated"]
    for missing, name in ((cpu, TO_DEVICE[1]), (publish, TO_HOST[1])):
        if missing is None:
            notes.append(f"nvbandwidth: the log has no {name}; run that test for the other direction")
    contention = tuple(
        Contention(measured=measured, busy=busy, slowdown=median(tests[alone]) / median(tests[both]), size_bytes=size)
        for measured, busy, both, alone in PAIRS
        if both in tests and alone in tests
    )
    return made_of(
        path,
        {"routes.cpu": cpu, "publish.cpu": publish, "contention": contention},
        source=Source(program="nvbandwidth", description=f"tests {', '.join(sorted(tests))}"),
        hardware={"device": devices[0], "devices": len(devices)} if devices else None,
        software=versions or None,
        notes=tuple(notes),
    )


class _Case(msgspec.Struct):
    name: str
    status: str = ""
    bandwidth_description: str = ""
    bandwidth_matrix: list[list[str | float]] = []
    sum: float | None = None


class _Report(msgspec.Struct):
    testcases: list[_Case] = []
    error: str | None = None
    version: str | None = None
    driver: str | None = msgspec.field(default=None, name="Driver Version")
    cuda: str | int | None = msgspec.field(default=None, name="CUDA Runtime Version")
    devices: list[str] = msgspec.field(default_factory=list, name="GPU Device list")


class _File(msgspec.Struct):
    nvbandwidth: _Report


def _of_json(path, text: str) -> Rates:
    """Read a log of ``nvbandwidth --json``, in which rates are strings."""
    try:
        report = msgspec.json.decode(text, type=_File).nvbandwidth
    except msgspec.MsgspecError as error:
        raise InputError(f"is not JSON of nvbandwidth, or is cut off: {error}", file=path) from None
    if report.error is not None and not report.testcases:
        raise InputError(f"nvbandwidth ended with an error: {report.error}", file=path)
    tests = {}
    for case in report.testcases:
        if case.name not in READ or case.status != "Passed":
            continue
        if "(GB/s)" not in case.bandwidth_description:
            raise InputError("rates are not in (GB/s)", file=path, field=case.name, value=case.bandwidth_description)
        cells, error = chain.from_iterable(case.bandwidth_matrix), partial(InputError, file=path, field=case.name)
        rates = [_rate(str(cell), error) for cell in cells if cell != "N/A"]
        # A test prints at most six digits of a rate.
        if not rates or case.sum is None or abs(case.sum - sum(rates)) > 0.01 * sum(rates):
            said = f"its rates add up to {sum(rates):.2f}"
            raise InputError(said, file=path, field=f"{case.name}.sum", value=case.sum)
        tests[case.name] = rates
    versions = {"nvbandwidth": report.version, "driver": report.driver, "cuda": report.cuda}
    return Rates(
        tests,
        [f"{case.name} ({case.status.lower()})" for case in report.testcases],
        [device.split(":")[1].strip() if ":" in device else device for device in report.devices],
        {name: str(version) for name, version in versions.items() if version is not None},
        BUFFER_BYTES,
    )


def _of_text(log: Log) -> Rates:
    names = [match[1] for _, match in log.find(r"^(?:Running|Waived:?) (\w+?)\.?\s*$")]
    devices = [match[1].strip() for _, match in log.find(r"^\s*Device \d+:\s*(.*)")]
    versions = log.last(
        nvbandwidth=r"nvbandwidth Version:\s*(\S+)",
        driver=r"^Driver Version:\s*(\S+)",
        cuda=r"CUDA Runtime Version:\s*(\S+)",
    )
    buffers = log.find(r"[Bb]uffer ?[Ss]ize[:= ]+(\d+)\s*(MiB|MB)?")
    size = next((log.size(number, match[1]) << 20 for number, match in buffers), BUFFER_BYTES)
    return Rates(_tests(log), list(dict.fromkeys(names)), devices, versions, size)


def _tests(log: Log) -> dict[str, list[float]]:
    """GB/s of every device (or pair) for each test."""
    tests: dict[str, list[float]] = {}
    name, start, rates, unit_seen = None, 0, [], False
    for number, line in enumerate(log.lines, 1):
        if match := re.match(r"Running (\w+?)\.?\s*$", line):
            if name is not None:
                raise log.error(start, WITHOUT_SUM)
            # Other tests print several matrices or latencies: they are ignored.
            name = match[1] if match[1] in READ else None
            start, rates, unit_seen = number, [], False
        elif name is None:
            continue
        elif "WAIVED" in line or line.startswith(f"Waived: {name}"):
            name = None
        elif "bandwidth (" in line:
            if "(GB/s)" not in line:
                raise log.error(number, "rates are not in (GB/s)")
            unit_seen = True
        elif match := re.match(rf"(SUM|MIN|MAX|AVG|MEDIAN) {name}\s+(\S+)", line):
            if not rates or not unit_seen:
                raise log.error(number, "a sum without rates in (GB/s) above it")
            total = _rate(match[2], partial(log.error, number))
            if match[1] == "SUM" and abs(total - sum(rates)) > 0.01 * total + 0.01 * len(rates):
                raise log.error(number, f"the rates above it add up to {sum(rates):.2f}: a part is missing")
            tests[name], name = rates, None
        elif unit_seen and re.match(r"\s*\d+\s+(N/A|-?\d+\.\d|nan|inf)", line):  # a row: its index, then rates
            rates += [_rate(text, partial(log.error, number)) for text in line.split()[1:] if text != "N/A"]
    if name is not None:
        raise log.error(start, WITHOUT_SUM)
    if start and not any(line.strip() for line in log.lines[start:]):  # the test's name itself may be cut off
        raise log.error(start, "the log ends where this test begins: cut off")
    return tests


def _rate(text: str, error: Callable[[str], InputError]) -> float:
    rate = finite(text) or 0.0
    if rate <= 0:
        raise error(f"rate {text} must be a positive number")
    return rate
