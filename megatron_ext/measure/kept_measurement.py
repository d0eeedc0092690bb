"""The curves that a measurement has so far, kept next to the table that it will write. If it is killed, only seconds of
work are lost."""

import os
from pathlib import Path
from typing import Literal

import msgspec

from megatron_ext.formats import json_files
from megatron_ext.formats.errors import InputError
from megatron_ext.formats.facts import Facts
from megatron_ext.formats.versions import SCHEMA_VERSION
from megatron_ext.measure.options import Options
from megatron_ext.runtime.machine import environment

KEEP_SECONDS = 5.0
"""The least time between two writes of the file."""

Visits = dict[tuple[str, int], list]
"""By curve and size, a list over visits of (microseconds that count in each round, microseconds until issued)."""


class KeptMeasurement(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Content of the file. ``seconds``: time that the curves took. ``curves``: name, size and visits."""

    schema_version: int
    kind: Literal["measurement"]
    options: Facts
    environment: dict[str, Facts]
    seconds: float
    curves: tuple[tuple[str, int, list[tuple[list[list[float]], list[float]]]], ...]


def path_of(out: str) -> str:
    """The path of the file while ``out`` is measured."""
    return f"{out}.measuring"


def remove(out: str) -> None:
    """Remove the file; its content is in ``out`` now."""
    Path(path_of(out)).unlink(missing_ok=True)


def _asked(options: Options) -> Facts:
    """The options without the time that was asked for, and with the threads that it was measured with."""
    facts = {**options.facts(), "threads": options.rank_threads}
    return {name: value for name, value in facts.items() if name != "seconds"}


def write(options: Options, visits: Visits, seconds: float) -> None:
    """Write the file, if the options name a place for it."""
    if options.keep_path is not None:
        rows = tuple((name, size, passes) for (name, size), passes in visits.items())
        facts = {"options": _asked(options), "environment": environment(options.device)}
        kept = KeptMeasurement(schema_version=SCHEMA_VERSION, kind="measurement", seconds=seconds, curves=rows, **facts)
        json_files.save(options.keep_path, kept)


def read(options: Options) -> tuple[Visits, float]:
    """Visits and the seconds that they took, from a measurement with the same options on this machine; empty without
    such a file, or if the file is incomplete."""
    if options.keep_path is None or not os.path.exists(options.keep_path):
        return {}, 0.0
    try:
        kept = json_files.load(options.keep_path, KeptMeasurement)
    except InputError:
        return {}, 0.0
    if (kept.options, kept.environment) != (_asked(options), environment(options.device)):
        return {}, 0.0
    return {(name, size): visits for name, size, visits in kept.curves}, kept.seconds
