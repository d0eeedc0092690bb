"""JSON files of published curves: one collective, several systems or several algorithms."""

from itertools import pairwise

import msgspec

from megatron_ext.cost.cost_table import CostTable, Curve, Point, Source
from megatron_ext.cost.imported_table import COLLECTIVES, table_of
from megatron_ext.formats import json_files
from megatron_ext.formats.checks import Checker
from megatron_ext.formats.errors import InputError

MAX_FALL = 0.25
"""Largest relative fall of the time from one size to the next. A fall is mentioned in a note. Published minima of small
messages fluctuate more than the means of a log (20.4 % at 256 bytes in the seed notes)."""


class _Row(msgspec.Struct, forbid_unknown_fields=True):
    size_bytes: int
    us: float | None = None
    in_place_us: float | None = None
    out_of_place_us: float | None = None


class _Curve(msgspec.Struct, forbid_unknown_fields=True):
    points: list[_Row]
    system: str | None = None
    algorithm: str | None = None
    world_size: int | None = None


class _CurvesFile(msgspec.Struct, forbid_unknown_fields=True):
    source: str
    collective: str
    curves: list[_Curve]
    world_size: int | None = None


def read(path, *, system: str | None = None) -> CostTable:
    """Read a file. Curves that are named by ``algorithm`` become one curve that chooses by size. If there are several
    systems, one of them must be named.

    Raises:
        InputError: unknown collective, several systems and none named, no points, a size twice, or a time that is not
        positive. The message names the field.
    """
    content, check = json_files.load(path, _CurvesFile), Checker(path)
    if content.collective not in COLLECTIVES:
        check.refuse(f"known: {', '.join(COLLECTIVES)}", "collective", content.collective)
    systems = [curve.system for curve in content.curves if curve.system is not None]
    chosen = [index for index, curve in enumerate(content.curves) if system in (None, curve.system)]
    if system is not None and not chosen:
        raise InputError(f"the file has: {'; '.join(systems) or 'no names'}", file="--system", value=system)
    if system is None and len(systems) > 1:
        check.refuse(f"the file has several systems; choose one with --system: {'; '.join(systems)}", "curves")
    if not chosen:
        check.refuse("is empty", "curves")
    points, algorithms, notes = (), {}, []
    for index in chosen:
        curve, field = content.curves[index], f"curves[{index}]"
        read_points = _points(curve, field, check)
        falls = [after.size_bytes for before, after in pairwise(read_points) if after.p50_us < before.p50_us]
        if falls:
            name = curve.algorithm or curve.system or content.collective
            notes.append(f"{name}: times fall with size at {', '.join(map(str, falls))} bytes")
        if curve.algorithm is not None:
            if curve.algorithm in algorithms:
                check.refuse("appears twice", f"{field}.algorithm", curve.algorithm)
            algorithms[curve.algorithm] = read_points
        elif len(chosen) > 1:
            check.refuse("needs a name, because the file has several curves", f"{field}.algorithm")
        else:
            points = read_points
    first = content.curves[chosen[0]]
    check.at_least(1, content.world_size, "world_size")
    check.at_least(1, first.world_size, f"curves[{chosen[0]}].world_size")
    world_size = first.world_size or content.world_size
    placed = any(row.us is None for index in chosen for row in content.curves[index].points)
    source = content.source + ("; in place" if placed else "")
    return table_of(
        path,
        content.collective,
        Curve(points=points, algorithms=algorithms, source=source),
        source=Source(program="curves", description=f"{content.source} ({first.system})"),
        hardware={"device": first.system} if first.system else None,
        world_sizes={"data_parallel_size": world_size} if world_size else None,
        notes=tuple(notes),
    )


def _points(curve: _Curve, field: str, check: Checker) -> tuple[Point, ...]:
    if not curve.points:
        check.refuse("is empty", f"{field}.points")
    points = []
    for index, row in enumerate(curve.points):
        us = row.us if row.us is not None else row.in_place_us
        where = f"{field}.points[{index}]"
        if us is None:
            check.refuse("has neither us nor in_place_us", where)
        check.positive(us, f"{where}.us")
        if points and row.size_bytes <= points[-1].size_bytes:
            check.refuse(f"does not grow from {points[-1].size_bytes}", f"{where}.size_bytes", row.size_bytes)
        if points and us < points[-1].p50_us * (1 - MAX_FALL):
            said = f"is below {points[-1].p50_us} us for {points[-1].size_bytes} bytes: not monotone"
            check.refuse(said, f"{where}.us", us)
        points.append(Point(size_bytes=row.size_bytes, p50_us=us))
    return tuple(points)
