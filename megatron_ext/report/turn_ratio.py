"""The ratio of two runs that took turns, every turn next to the other run's turns just before and behind it; and
whether that ratio bears a verdict out.

The first iteration of a turn is left out: publishing and gathers that a rank starts at the end of an iteration had the
whole turn of the other run for themselves.
"""

from collections.abc import Sequence
from statistics import median, stdev
from typing import NamedTuple

from megatron_ext.planner.verdict import CANNOT_TELL, HELPS, LEAST_GAIN
from megatron_ext.report.spread import warm_up


class TurnRatio(NamedTuple):
    """Scheduled over stock: median over turns, the standard error of the median, how many turns."""

    ratio: float
    standard_error: float
    turns: int


def counted(iterations: int, turn_iterations: int | None) -> list[int]:
    """Indices of the iterations that figures are of."""
    warm = range(warm_up(iterations), iterations)
    inner = [index for index in warm if not turn_iterations or index % turn_iterations]
    return inner or list(warm)


def turn_ratio(stock: Sequence[float], scheduled: Sequence[float], turn_iterations: int) -> TurnRatio | None:
    """The ratio of a figure of every iteration, each turn of stock's before the scheduled run's; None below two turns.

    The standard error of a median is 1.2533 times that of a mean, for a normal distribution.
    """
    base: dict[int, list[float]] = {}
    ours: dict[int, list[float]] = {}
    for index in counted(len(stock), turn_iterations):
        base.setdefault(index // turn_iterations, []).append(stock[index])
        ours.setdefault(index // turn_iterations, []).append(scheduled[index])
    ratios = []
    for turn, values in ours.items():
        near = [median(base[number]) for number in (turn, turn + 1) if number in base]
        ratios.append(median(values) / (sum(near) / len(near)))
    if len(ratios) < 2:
        return None
    return TurnRatio(median(ratios), 1.2533 * stdev(ratios) / len(ratios) ** 0.5, len(ratios))


RIGHT, WRONG, UNDECIDED = "right", "wrong", "not decided by this measurement"
ERRORS = 2.0
"""Standard errors on either side of a measured ratio."""


def check_verdict(answer: str | None, ratio: float, standard_error: float) -> str | None:
    """What a measured ratio (schedule to stock) says of ``answer``; None where the plan gave none or could not tell.

    ``helps`` claims a gain, ``does not help`` claims one of less than 1 %. The claim is right or wrong if the whole
    interval of the measurement lies on one side.
    """
    if answer is None or answer == CANNOT_TELL:
        return None
    low, high = 1 - ratio - ERRORS * standard_error, 1 - ratio + ERRORS * standard_error
    if answer == HELPS:
        return RIGHT if low > 0 else WRONG if high < 0 else UNDECIDED
    return RIGHT if high < LEAST_GAIN else WRONG if low > LEAST_GAIN else UNDECIDED
