"""Medians and spreads, warm-up left out."""

from megatron_ext.report.spread import median_iteration, summarize


def test_the_spread_reaches_from_the_10th_to_the_90th_percentile():
    assert summarize([float(i) for i in range(101)]) == (50.0, 10.0, 90.0, 101)


def test_the_median_iteration_is_never_one_of_the_warm_up():
    times = [3.0, 3.0, 1.0, 3.1, 9.0]
    assert median_iteration(times, [True] * 5) == 4
    assert median_iteration(times, [True, True, True, False, True]) == 3
    # With none usable, one is shown all the same.
    assert median_iteration(times, [False] * 5) == 4
    assert median_iteration([7.0], [True]) == 1
