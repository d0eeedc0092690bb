"""What holds for every curve and every size."""

from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ext.cost.cost_table import Curve, Point
from megatron_ext.cost.curve import lookup, residuals

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
