"""The ratio of two runs that took turns, each turn compared with the other run's turns just before and after it; and
whether that ratio confirms a verdict.

The first iteration of a turn is left out: publishing and gathers that a rank starts at the end of an iteration had the
whole turn of the other run to finish.
"""

from collections.abc import Iterable, Sequence
from statistics import median, stdev
from typing import NamedTuple

from megatron_ext.planner.verdict import CANNOT_TELL, HELPS, LEAST_GAIN
from megatron_ext.report.spread import warm_up


class TurnRatio(NamedTuple):
    """Scheduled / stock: the median over turns, the standard error of the median, and the number of turns."""

    ratio: float
    standard_error: float
    turns: int


def counted(iterations: int, turn_iterations: int | None) -> list[int]:
    """The indices of the iterations that count."""
    warm = range(warm_up(iterations), iterations)
    inner = [index for index in warm if not turn_iterations or index % turn_iterations]
    return inner or list(warm)


def turn_ratio(
    stock: Sequence[float], scheduled: Sequence[float], turn_iterations: int, indices: Iterable[int]
) -> TurnRatio | None:
    """The ratio of two series of one figure per iteration, at the ``indices`` that count. In each turn stock trains
    first. None with less than two turns.

    The standard error of a median is 1.2533 times that of a mean, for a normal distribution.
    """
    base: dict[int, list[float]] = {}
    ours: dict[int, list[float]] = {}
    for index in indices:
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
"""The interval of a measured ratio is this many standard errors to either side."""


def check_verdict(answer: str | None, ratio: float, standard_error: float) -> str | None:
    """What a measured ratio (schedule / stock) says about ``answer``; None if the plan gave none or could not tell.

    ``helps`` claims a gain, ``does not help`` claims one of less than 1 %. The claim is right or wrong if the whole
    interval of the measurement lies on one side.
    """
    if answer is None or answer == CANNOT_TELL:
        return None
    low, high = 1 - ratio - ERRORS * standard_error, 1 - ratio + ERRORS * standard_error
    if answer == HELPS:
        return RIGHT if low > 0 else WRONG if high < 0 else UNDECIDED
    return RIGHT if high < LEAST_GAIN else WRONG if low > LEAST_GAIN else UNDECIDED
