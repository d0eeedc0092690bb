"""What a measurement has of its curves, kept next to the table that it will write: a kill loses seconds of it."""

import contextlib
import os
from typing import Literal

import msgspec

from megatron_ext.formats import json_files
from megatron_ext.formats.errors import InputError
from megatron_ext.formats.facts import Facts
from megatron_ext.formats.versions import SCHEMA_VERSION
from megatron_ext.measure.options import Options
from megatron_ext.runtime.machine import environment

KEEP_SECONDS = 5.0
"""How often it is written at the most."""

Visits = dict[tuple[str, int], list]
"""By curve and size, a list over visits of (microseconds that count in each round, issued)."""


class Kept(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``seconds``: that the curves took. ``curves``: name, size and visits."""

    schema_version: int
    kind: Literal["measurement"]
    options: Facts
    environment: dict[str, Facts]
    seconds: float
    curves: tuple[tuple[str, int, list[tuple[list[list[float]], list[float]]]], ...]


def path_of(out: str) -> str:
    """Where it lies while ``out`` is measured."""
    return f"{out}.measuring"


def remove(out: str) -> None:
    """It is in ``out``."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path_of(out))


def _asked(options: Options) -> Facts:
    """What was asked for, however long it may take."""
    return {name: value for name, value in options.facts().items() if name != "seconds"}


def write(options: Options, visits: Visits, seconds: float) -> None:
    """Write it, where the options say that it is kept."""
    if options.keep_path is not None:
        rows = tuple((name, size, passes) for (name, size), passes in visits.items())
        facts = {"options": _asked(options), "environment": environment(options.device)}
        kept = Kept(schema_version=SCHEMA_VERSION, kind="measurement", seconds=seconds, curves=rows, **facts)
        json_files.save(options.keep_path, kept)


def read(options: Options) -> tuple[Visits, float]:
    """Visits, and the seconds that they took: of a measurement of the same on this machine; none where there is none,
    or where the file was cut short."""
    if options.keep_path is None or not os.path.exists(options.keep_path):
        return {}, 0.0
    try:
        kept = json_files.load(options.keep_path, Kept)
    except InputError:
        return {}, 0.0
    if (kept.options, kept.environment) != (_asked(options), environment(options.device)):
        return {}, 0.0
    return {(name, size): visits for name, size, visits in kept.curves}, kept.seconds
