"""Medians and spreads."""

from megatron_ext.report.spread import summarize


def test_the_spread_reaches_from_the_10th_to_the_90th_percentile():
    assert summarize([float(i) for i in range(101)]) == (50.0, 10.0, 90.0, 101)
