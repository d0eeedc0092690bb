"""Which iterations of interleaved runs are compared (benchmarks/interleaved_ab.py)."""

from types import SimpleNamespace

import pytest
from interleaved_ab import over_slices, ratios_to, whole_iterations

RUN = SimpleNamespace(slices=[0, 0, 0, 0, 3, 3, 3, 6, 6])
US = [9e6, 2e6, 1e6, 1e6, 60e6, 1e6, 2e6, 2e6, 1e6]
"""The fifth and eighth were stopped in their middle; the eighth is short, as the slice before had almost ended it."""


def test_stopped_iterations_and_the_warm_up_are_left_out():
    assert whole_iterations(RUN, US, slice_s=10) == {0: [2, 3], 3: [5, 6], 6: [8]}
    assert whole_iterations(RUN, US, slice_s=10, warm_up=6) == {3: [6], 6: [8]}


def test_a_slice_of_one_iteration_has_no_median():
    figure = over_slices(RUN, US, US, slice_s=10)
    assert figure.values == [1e6, 1e6, 1e6, 2e6, 1e6] and figure.of_slice == {0: 1e6, 3: 1.5e6}
    assert over_slices(RUN, US, US, slice_s=10, warm_up=6).of_slice == {}


def test_a_drift_of_the_machine_falls_out_of_ratios():
    assert ratios_to({0: 1.0, 4: 2.0}, {1: 2.5, 3: 3.5}) == pytest.approx([2.0, 2.0])
    assert ratios_to({0: 1.0, 4: 2.0}, {5: 3.0}) == []  # no slice behind it
