"""Medians and spreads, warm-up left out."""

import pytest

from megatron_ext.report.spread import median_iteration, spread, summarize, warm_up


def test_the_first_two_iterations_are_left_out():
    assert spread([900.0, 800.0, 1.0, 3.0, 2.0]) == (2.0, 1.2, 2.8, 3)
    assert spread([0.0, 0.0, 5.0]).median_us == 5.0


@pytest.mark.parametrize("iterations", range(1, 6))
def test_something_always_remains(iterations):
    assert spread([float(i) for i in range(iterations)]).samples == iterations - warm_up(iterations) > 0


def test_the_spread_reaches_from_the_10th_to_the_90th_percentile():
    assert summarize([float(i) for i in range(101)]) == (50.0, 10.0, 90.0, 101)


def test_the_median_iteration_is_never_one_of_the_warm_up():
    times = [3.0, 3.0, 1.0, 3.1, 9.0]
    assert median_iteration(times, [True] * 5) == 4
    assert median_iteration(times, [True, True, True, False, True]) == 3
    # With none usable, one is shown all the same.
    assert median_iteration(times, [False] * 5) == 4
    assert median_iteration([7.0], [True]) == 1
