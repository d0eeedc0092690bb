"""Which iterations figures are of, the ratio of runs that took turns, and what it says of a verdict."""

import pytest

from megatron_ext.planner.verdict import CANNOT_TELL, HELPS, HELPS_NOT
from megatron_ext.report.spread import warm_up
from megatron_ext.report.turn_ratio import RIGHT, UNDECIDED, WRONG, check_verdict, counted, turn_ratio


@pytest.mark.parametrize("iterations", range(1, 6))
@pytest.mark.parametrize("turn_iterations", [None, 1, 3])
def test_warm_up_is_left_out_and_something_remains(iterations, turn_iterations):
    found = counted(iterations, turn_iterations)
    assert found and min(found) >= warm_up(iterations)


def test_the_first_iteration_of_a_turn_is_left_out():
    assert counted(9, 3) == [2, 4, 5, 7, 8]
    assert counted(6, None) == [2, 3, 4, 5]


def test_a_drift_of_the_machine_is_not_in_the_ratio():
    """The machine slows by 5 % a turn; the scheduled run takes 0.9 of stock's time and runs half a turn later."""
    pace = [1.05 ** (2 * (index // 3)) for index in range(24)]
    found = turn_ratio([100 * p for p in pace], [90 * p * 1.05 for p in pace], 3, counted(24, 3))
    assert found.turns == 8 and found.ratio == pytest.approx(0.9, rel=0.005)


def test_the_standard_error_is_of_turns():
    stock, scheduled = [100.0] * 24, [100.0 + 10 * (index // 3 % 2) for index in range(24)]
    found = turn_ratio(stock, scheduled, 3, counted(24, 3))
    assert found.ratio == pytest.approx(1.05) and found.standard_error == pytest.approx(0.0237, rel=0.01)
    assert turn_ratio(stock[:3], scheduled[:3], 3, counted(3, 3)) is None
    of_one_turn = [index for index in counted(24, 3) if index // 3 != 1]  # of skipped updates the others are
    assert turn_ratio(stock, scheduled, 3, of_one_turn).turns == 7


@pytest.mark.parametrize(
    "answer, ratio, was",
    [
        (HELPS, 0.9, RIGHT),
        (HELPS, 0.99, UNDECIDED),
        (HELPS, 1.1, WRONG),
        (HELPS_NOT, 1.1, RIGHT),
        (HELPS_NOT, 0.99, UNDECIDED),
        (HELPS_NOT, 0.9, WRONG),
        (CANNOT_TELL, 0.9, None),
        (None, 0.9, None),
    ],
)
def test_a_measured_ratio_bears_a_verdict_out_or_not(answer, ratio, was):
    assert check_verdict(answer, ratio, 0.02) == was
