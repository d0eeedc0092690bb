"""A figure that was measured once an iteration: its median and its spread."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy

WARM_UP = 2
"""Iterations at the start of a run that no figure includes: memory is touched, kernels are
chosen and caches filled for the first time."""


class Spread(NamedTuple):
    """Microseconds over ``samples`` iterations: median, 10th and 90th percentile."""

    median_us: float
    p10_us: float
    p90_us: float
    samples: int


def warm_up(iterations: int) -> int:
    """Iterations to leave out; a run that is no longer than its warm-up keeps its last one."""
    return min(WARM_UP, iterations - 1)


def summarize(values_us: Sequence[float]) -> Spread:
    """Median and spread of at least one figure."""
    p10, median, p90 = (float(value) for value in numpy.percentile(values_us, (10, 50, 90)))
    return Spread(median, p10, p90, len(values_us))


def median_iteration(per_iteration_us: Sequence[float], usable: Sequence[bool]) -> int:
    """Number (from 1) of the iteration nearest to the median, among the usable ones if any is."""
    first = warm_up(len(per_iteration_us))
    middle = summarize(per_iteration_us[first:]).median_us
    indices = range(first, len(per_iteration_us))
    chosen = [index for index in indices if usable[index]] or list(indices)
    return 1 + min(chosen, key=lambda index: (abs(per_iteration_us[index] - middle), index))
