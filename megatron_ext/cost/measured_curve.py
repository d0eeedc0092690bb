"""A curve of a cost table: measured cost by size."""

from collections.abc import Callable
from typing import Literal

import msgspec
from msgspec.structs import replace

from megatron_ext.formats.checks import Checker
from megatron_ext.workload.drive_reads import DriveReads

MOST_FALL = 1000
"""Times of small messages are noisy and may fall from one size to the next, but not by this factor."""

MOST_POINTS = 10_000
"""Most points of one curve. A power-of-2 grid has about 30."""


class Point(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """One measured size. ``p50_us`` is the time until the bytes have arrived. ``issued_us`` is the time until the call
    returns, if it is asynchronous."""

    size_bytes: int
    p50_us: float
    p95_us: float | None = None
    samples: int = 1
    issued_us: float | None = None


class Curve(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """Cost by size. ``algorithms`` holds one curve per name if a source compares several (nccl_ring, nccl_tree, ...).
    ``source`` says where the figures come from. ``reads`` says how the drive was read, for the route ``nvme``.
    ``counts`` says what the sizes are bytes of: gradients in an imported ``reduce``, in all others parameters whose
    gradients are float32."""

    points: tuple[Point, ...] = ()
    algorithms: dict[str, tuple[Point, ...]] = {}
    source: str | None = None
    reads: DriveReads | None = None
    counts: Literal["parameters", "gradients"] = "parameters"


MaybeCurve = Curve | None
"""None: the table does not have this curve."""


def with_points(curve: Curve, change: Callable[[str, tuple[Point, ...]], tuple[Point, ...]]) -> Curve:
    """``curve`` with its points, and the points of each of its algorithms, replaced by ``change(field, points)``."""
    own = change("points", curve.points)
    algorithms = {name: change(f"algorithms.{name}", points) for name, points in curve.algorithms.items()}
    return replace(curve, points=own, algorithms=algorithms)


def checked_points(points: tuple[Point, ...], field: str, checker: Checker) -> tuple[Point, ...]:
    """The points sorted by size.

    Raises:
        InputError: a figure is not plausible, by itself or compared with the figure of the next smaller size.
    """
    if len(points) > MOST_POINTS:
        checker.refuse(f"more than {MOST_POINTS} points", field, len(points))
    sizes = set()
    for index, point in enumerate(points):
        where = f"{field}[{index}]"
        checker.size(point.size_bytes, f"{where}.size_bytes")
        if point.size_bytes in sizes:
            checker.refuse("appears twice", f"{where}.size_bytes", point.size_bytes)
        sizes.add(point.size_bytes)
        checker.duration(point.p50_us, f"{where}.p50_us")
        checker.duration(point.p95_us, f"{where}.p95_us")
        checker.not_below("p50_us", point.p50_us, point.p95_us, f"{where}.p95_us")
        checker.duration(point.issued_us, f"{where}.issued_us", zero=True)
        checker.at_least(1, point.samples, f"{where}.samples")
    order = sorted(range(len(points)), key=lambda index: points[index].size_bytes)
    for smaller, larger in zip(order, order[1:]):
        if points[larger].p50_us * MOST_FALL < points[smaller].p50_us:
            took = f"the {points[smaller].p50_us:g} us that {points[smaller].size_bytes} bytes take"
            said = f"is not a plausible time: less than 1/{MOST_FALL} of {took}"
            checker.refuse(said, f"{field}[{larger}].p50_us", points[larger].p50_us)
    return tuple(points[index] for index in order)
