"""Which iterations of runs that share the machine in turns are compared (benchmarks/in_turns.py)."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
from emulation import behind_every_second  # noqa: E402
from in_turns import over_turns, ratios_to, whole_iterations  # noqa: E402

RUN = SimpleNamespace(turns=[0, 0, 0, 0, 3, 3, 3, 6, 6])
US = [9e6, 2e6, 1e6, 1e6, 60e6, 1e6, 2e6, 2e6, 1e6]
"""The fifth and eighth were stopped in their middle; the eighth is short, as the turn before had almost ended it."""


def test_stopped_iterations_and_the_warm_up_are_left_out():
    assert whole_iterations(RUN, US, turn_s=10) == {0: [2, 3], 3: [5, 6], 6: [8]}
    assert whole_iterations(RUN, US, turn_s=10, warm_up=6) == {3: [6], 6: [8]}


def test_a_turn_of_one_iteration_has_no_median():
    figure = over_turns(RUN, US, US, turn_s=10)
    assert figure.values == [1e6, 1e6, 1e6, 2e6, 1e6] and figure.of_turn == {0: 1e6, 3: 1.5e6}
    assert over_turns(RUN, US, US, turn_s=10, warm_up=6).of_turn == {}


def test_a_drift_of_the_machine_falls_out_of_ratios():
    assert ratios_to({0: 1.0, 4: 2.0}, {1: 2.5, 3: 3.5}) == pytest.approx([2.0, 2.0])
    assert ratios_to({0: 1.0, 4: 2.0}, {5: 3.0}) == []  # no turn behind it


def test_compute_has_a_turn_behind_every_second_run():
    assert behind_every_second([1, 2, 3, 4], "m") == [1, 2, "m", 3, 4, "m"]
    assert behind_every_second([1, 2, 3], "m") == [1, 2, "m", 3, "m"]
    assert behind_every_second([1], "m") == [1, "m"]
