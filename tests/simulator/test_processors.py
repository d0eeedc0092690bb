"""Processors of one machine, by themselves."""

import pytest

from megatron_ext.simulator.processors import Processors


def test_compute_hears_of_a_debt_that_ends_just_when_a_rank_does():
    """Two ranks compute on two processors; a transport that asks for both for 100 us is owed 100, until 200. The rank
    that still computes then has a whole processor, as it would have had with both computing."""
    speeds, wakes = [], []
    processors = Processors(2.0, lambda: speeds.append(processors.speed()), lambda _, time, version: wakes.append((time, version)))
    processors.compute(0.0, 2)
    processors.take(0.0, 2.0)
    processors.take(100.0, -2.0)
    assert speeds == [0.5] and processors.owed == pytest.approx(100.0) and wakes[-1][0] == pytest.approx(200.0)
    processors.compute(200.0, -1)
    processors.repaid(*wakes[-1])  # of another version by now: nobody is told again
    assert speeds == [0.5, 1.0] and processors.owed == 0.0
