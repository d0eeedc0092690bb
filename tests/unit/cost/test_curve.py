"""The interval of a read-out is honest: it holds the left-out point, and is not so wide that it says nothing."""

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from places import DATA_DIR

from megatron_ext.cost.cost_table import Curve, Point
from megatron_ext.cost.curve import lookup, residuals

PUBLISHED = json.loads((DATA_DIR / "published_allgather_curves.json").read_text())


def left_out(points):
    """(estimate without the point, the point) for each inner point."""
    for index in range(1, len(points) - 1):
        yield lookup(points[:index] + points[index + 1 :], points[index].size_bytes), points[index]


@pytest.mark.parametrize("curve", PUBLISHED["curves"], ids=lambda curve: curve["system"])
def test_published_curves_within_5_percent(curve):
    points = tuple(Point(size_bytes=row["size_bytes"], p50_us=row["us"]) for row in curve["points"])
    rows = list(left_out(points))
    assert len(rows) == len(points) - 2
    for estimate, point in rows:
        assert abs(estimate.us / point.p50_us - 1) <= 0.05
        assert estimate.low_us <= point.p50_us <= estimate.high_us


def simulated(noise: float, seed: int, num_points: int = 14):
    """A latency floor, a bend and a bandwidth, each time off by a normal factor of ``noise``."""
    draw = random.Random(seed)
    floor, rate = draw.uniform(5, 200), draw.uniform(1e3, 4e5)
    points = []
    for index in range(num_points):
        size = 1 << (16 + index)
        bend = 1 + draw.uniform(0, 0.02)
        true = (floor**1.5 + (size / rate) ** 1.5) ** (1 / 1.5) * bend
        points.append(Point(size_bytes=size, p50_us=max(true * (1 + draw.gauss(0, noise)), true * 0.1)))
    return tuple(points)


@pytest.mark.parametrize("noise", [0.01, 0.03, 0.1, 0.2, 0.3])
def test_noisy_curves_lie_in_their_interval(noise):
    inside = total = 0
    width = []
    for seed in range(200):
        for estimate, point in left_out(simulated(noise, seed)):
            total += 1
            inside += estimate.low_us <= point.p50_us <= estimate.high_us
            width.append((estimate.high_us - estimate.low_us) / 2 / estimate.us)
    width.sort()
    print(f"noise {noise:.0%}: {inside / total:.1%} inside, median half-width {width[len(width) // 2]:.1%}")
    assert inside / total >= 0.9
    assert width[len(width) // 2] <= 5 * noise + 0.15


times = st.floats(0.01, 1e9, allow_nan=False)


@st.composite
def curves(draw):
    sizes = draw(st.lists(st.integers(1, 1 << 40), min_size=1, max_size=12, unique=True))
    return tuple(
        Point(
            size_bytes=size,
            p50_us=us,
            p95_us=draw(st.none() | st.floats(1.0, 20.0).map(lambda ratio, us=us: us * ratio)),
            samples=draw(st.integers(1, 200)),
        )
        for size, us in zip(sorted(sizes), draw(st.lists(times, min_size=len(sizes), max_size=len(sizes))))
    )


@settings(max_examples=150, deadline=None)
@given(curves(), st.integers(0, 1 << 41))
def test_interval_holds_the_estimate_and_nothing_is_negative(points, size):
    estimate = lookup(points, size, extrapolate=True)
    assert 0 <= estimate.low_us <= estimate.us <= estimate.high_us
    assert estimate.extrapolated == (not points[0].size_bytes <= size <= points[-1].size_bytes)


@settings(max_examples=150, deadline=None)
@given(curves(), st.data())
def test_measured_sizes_read_as_measured_and_others_between_their_neighbours(points, data):
    for point in points:
        assert lookup(points, point.size_bytes).us == point.p50_us
    if len(points) > 1:
        index = data.draw(st.integers(0, len(points) - 2))
        left, right = points[index], points[index + 1]
        size = data.draw(st.integers(left.size_bytes, right.size_bytes))
        low, high = sorted((left.p50_us, right.p50_us))
        assert low * (1 - 1e-9) <= lookup(points, size).us <= high * (1 + 1e-9)
    assert len(residuals(points)) == len(points)


@settings(max_examples=80, deadline=None)
@given(st.dictionaries(st.sampled_from("abcd"), curves(), min_size=1), st.integers(0, 1 << 41))
def test_the_best_of_several_algorithms_that_were_measured_there(algorithms, size):
    covering = {
        name: points for name, points in algorithms.items() if points[0].size_bytes <= size <= points[-1].size_bytes
    }
    estimate = lookup(Curve(algorithms=algorithms), size, extrapolate=True)
    pool = covering or algorithms
    assert estimate.algorithm in pool
    assert estimate.us == min(lookup(points, size, extrapolate=True).us for points in pool.values())
