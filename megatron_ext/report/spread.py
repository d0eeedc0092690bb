"""The median and the spread of a figure that was measured once per iteration."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy

WARM_UP = 2
"""The number of iterations at the start of a run that no figure includes: in them memory is touched, kernels are
chosen and caches are filled for the first time."""


class Spread(NamedTuple):
    """Microseconds over ``samples`` iterations: median, 10th and 90th percentile."""

    median_us: float
    p10_us: float
    p90_us: float
    samples: int


def warm_up(iterations: int) -> int:
    """The number of iterations to leave out. A run that is no longer than the warm-up keeps its last iteration."""
    return min(WARM_UP, iterations - 1)


def summarize(values_us: Sequence[float]) -> Spread:
    """The median and spread of ``values_us``, which must not be empty."""
    p10, median, p90 = (float(value) for value in numpy.percentile(values_us, (10, 50, 90)))
    return Spread(median, p10, p90, len(values_us))
