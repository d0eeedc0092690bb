"""Reading a curve between its points: piecewise linear in bytes, with an interval.

A straight alpha-beta line is up to 32 % off on published curves, so the points themselves are the model. The curve
itself shows how wrong reading between its points can be. Each inner point is predicted from its two neighbours, and the
size of the misses nearby (curvature and noise together) gives the half-width of the interval. If p95 was measured, the
spread of the samples widens the interval further; the more samples, the less.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

from msgspec.structs import replace

from megatron_ext.cost.cost_table import Curve, Point, with_points
from megatron_ext.formats.errors import InputError

NEIGHBOURS = 4
"""Inner points on each side whose leave-one-out misses determine the half-width."""

SAFETY = 1.8
"""Factor on the root mean square of those misses, together with the Student-like factor of :func:`_half_width`. It was
chosen on simulated curves (tests/unit/cost/test_curve.py): 94 % and more of the left-out points lie in the interval, at
noise of 1 % to 30 %."""

INDEPENDENT = 25
"""Samples of one point count as at most this many independent samples."""

UNKNOWN = 0.05
"""Relative half-width if a curve has too few points to show how rough it is."""


class Estimate(NamedTuple):
    """The median time in microseconds, with the interval in which it probably lies. Single gathers spread further; a
    point's p95 shows that.

    ``algorithm`` is the name of the fastest algorithm if the curve holds several. ``extrapolated`` is true outside the
    measured range.
    """

    us: float
    low_us: float
    high_us: float
    algorithm: str | None = None
    extrapolated: bool = False


def lookup(
    curve: Curve | Sequence[Point], size_bytes: int, *, extrapolate: bool = False, what: str = "points", file=None
) -> Estimate:
    """Time for ``size_bytes`` on ``curve``.

    Args:
        curve: a curve, or points sorted by size (as :func:`megatron_ext.cost.cost_table.check` leaves them).
        size_bytes: bytes of the whole (gathered) group.
        extrapolate: outside the measured range, extend the nearest segment instead of raising an error.
        what: the curve's field in the table, for the error.
        file: the table's path, for the error.

    Returns:
        The estimate. If there are several algorithms, that of the fastest one at this size.

    Raises:
        InputError: the curve has no points, or the size is outside their range.
    """
    candidates = curves_of(curve)
    if not candidates:
        raise InputError("has no points; megatron-ext measure or cost estimate gives them", file=file, field=what)
    covering = {name: points for name, points in candidates.items() if covers(points, size_bytes)}
    if not covering and not extrapolate:
        smallest = min(points[0].size_bytes for points in candidates.values())
        largest = max(points[-1].size_bytes for points in candidates.values())
        said = f"outside the measured range {smallest} to {largest} bytes; measure that size or ask for extrapolation"
        raise InputError(said, file=file, field=f"{what}.size_bytes", value=size_bytes)
    # An algorithm that was measured at this size is preferred to one that was not.
    estimates = {name: _read(tuple(points), size_bytes) for name, points in (covering or candidates).items()}
    name = min(estimates, key=lambda key: estimates[key].us)
    return estimates[name]._replace(algorithm=name)


def curves_of(curve: Curve | Sequence[Point]) -> dict[str | None, tuple[Point, ...]]:
    """Curves among which one can choose at every size: ``points`` under ``None``, then the named algorithms."""
    if not isinstance(curve, Curve):
        return {None: tuple(curve)} if curve else {}
    named = {name: points for name, points in curve.algorithms.items() if points}
    return ({None: curve.points} if curve.points else {}) | named


def points_of(curve: Curve | Sequence[Point] | None) -> list[Point]:
    """All points in which a size can be looked up, one curve after the other."""
    return [point for points in curves_of(curve or ()).values() for point in points]


def has_points(curve: Curve | Sequence[Point] | None) -> bool:
    """Whether the curve has points in which a size can be looked up."""
    return curve is not None and bool(curves_of(curve))


def by_sizes(curve: Curve, size: Callable[[int], int]) -> Curve:
    """``curve`` with its times moved to ``size(size_bytes)`` bytes. If two points get the same size, the larger one
    stays."""

    def moved(_: str, points: tuple[Point, ...]) -> tuple[Point, ...]:
        sizes = {size(point.size_bytes): point for point in points}
        return tuple(replace(point, size_bytes=size_bytes) for size_bytes, point in sizes.items())

    return with_points(curve, moved)


def covers(points: Sequence[Point], size_bytes: int) -> bool:
    return points[0].size_bytes <= size_bytes <= points[-1].size_bytes


def between(left: Point, right: Point, size_bytes: float) -> float:
    """Time at ``size_bytes`` on the line through two points, also outside of them."""
    share = (size_bytes - left.size_bytes) / (right.size_bytes - left.size_bytes)
    return left.p50_us + share * (right.p50_us - left.p50_us)


@lru_cache(maxsize=1 << 16)
def _read(points: tuple[Point, ...], size_bytes: int) -> Estimate:
    if not covers(points, size_bytes):
        return _beyond(points, size_bytes)
    index = bisect_left(points, size_bytes, key=lambda point: point.size_bytes)
    right = points[index]
    left = right if right.size_bytes == size_bytes else points[index - 1]
    us = right.p50_us if left is right else between(left, right, size_bytes)
    spread = max(spread_of_samples(left), spread_of_samples(right))
    half = _half_width(points, index if left is right else index - 0.5)
    return _around(us, us, us, half, spread)


def _around(
    us: float, lowest: float, highest: float, half: float, spread: float, *, extrapolated: bool = False
) -> Estimate:
    """An estimate from ``lowest`` to ``highest``, widened by a relative half-width and by the spread of the samples.

    The measured spread is upwards. Below the median the same ratio is assumed.
    """
    low_us = min(lowest * (1 - min(half, 0.9)), lowest / (1 + spread))
    return Estimate(us, low_us, highest * (1 + max(half, spread)), extrapolated=extrapolated)


def _beyond(points: tuple[Point, ...], size_bytes: int) -> Estimate:
    """An estimate outside the range: along the nearest segment, in an interval between two simple guesses."""
    low_end = size_bytes < points[0].size_bytes
    end, inner = (points[0], points[1:2]) if low_end else (points[-1], points[-2:-1])
    proportional = end.p50_us * size_bytes / end.size_bytes if end.size_bytes else end.p50_us
    guesses = [proportional] + ([end.p50_us] if low_end else [])
    us = proportional
    if inner:
        low, high = sorted((end, inner[0]), key=lambda point: point.size_bytes)
        line = between(low, high, size_bytes)
        # A falling last segment is noise. Below the range the line may cross zero.
        if low_end:
            us = min(max(line, proportional), end.p50_us)
        elif line > end.p50_us:
            us = line
        guesses.append(us)
    half = _half_width(points, 0 if low_end else len(points) - 1)
    return _around(us, min(guesses), max(guesses), half, spread_of_samples(end), extrapolated=True)


def spread_of_samples(point: Point) -> float:
    """How far off the median of a point's samples may be, relative to it. For one sample this is the distance of p95.
    It is less with more samples, but not much less, because samples that are taken at one time do not show how the
    machine changes."""
    if point.p95_us is None:
        return 0.0
    return (point.p95_us - point.p50_us) / point.p50_us / min(point.samples, INDEPENDENT) ** 0.5


@lru_cache(maxsize=4096)
def residuals(points: tuple[Point, ...]) -> list[float | None]:
    """Leave-one-out misses: for each inner point, (read from its neighbours - measured) / measured;
    ``None`` at both ends."""
    inner = [
        between(points[i - 1], points[i + 1], points[i].size_bytes) / points[i].p50_us - 1
        for i in range(1, len(points) - 1)
    ]
    return [None, *inner, None][: len(points)] if len(points) > 1 else [None] * len(points)


def _half_width(points: tuple[Point, ...], position: float) -> float:
    """Relative half-width near ``position`` (an index; x.5 means between two points)."""
    known = [(abs(index - position), value) for index, value in enumerate(residuals(points)) if value is not None]
    nearest = [value for _, value in sorted(known)[: 2 * NEIGHBOURS]]
    if not nearest:
        return UNKNOWN
    rms = (sum(value * value for value in nearest) / len(nearest)) ** 0.5
    # Few misses say little about the size of the next one, as in Student's t.
    return SAFETY * rms * (1 + 2 / len(nearest))
