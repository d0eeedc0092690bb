"""Processors that ranks of one machine share."""

import pytest

from megatron_ext.simulator.host_processors import SharedProcessors


def test_compute_hears_of_a_backlog_that_ends_just_when_a_rank_does():
    """Two ranks compute on two processors. A transport asks for both for 100 us: the backlog of 100 us is drained at
    200. The rank that still computes then has a whole processor, as it would have had with both computing."""
    speeds, wakes = [], []
    processors = SharedProcessors(
        2.0, lambda: speeds.append(processors.speed()), lambda _, time, version: wakes.append((time, version))
    )
    processors.change_load(0.0, 2)
    processors.change_asked(0.0, 2.0)
    processors.change_asked(100.0, -2.0)
    assert speeds == [0.5] and processors.backlog == pytest.approx(100.0) and wakes[-1][0] == pytest.approx(200.0)
    processors.change_load(200.0, -1)
    processors.drained(*wakes[-1])  # of an earlier version: nobody is told again
    assert speeds == [0.5, 1.0] and processors.backlog == 0.0
