"""Where the true curve may lie, given measured points with noise.

[Note: A curve is smooth, its noise is not]
The logarithms of the measured times are the true ones plus independent noise. The true curve is a line, given by a
latency and a rate that are not known beforehand, times a smooth departure: a Gaussian process over the logarithm of the
size. Its posterior (kriging: Rasmussen and Williams, Gaussian Processes for Machine Learning, 2006, chapter 2) is
normal. Points with little noise keep their measured times. Points with much noise move towards their neighbours, so
that a plan does not gain from a size that looked fast by chance.
"""

from collections.abc import Sequence
from functools import lru_cache
from math import log, log1p, sqrt
from statistics import NormalDist

import numpy

from megatron_ext.cost.cost_table import Point
from megatron_ext.cost.curve import INDEPENDENT, NEIGHBOURS, residuals

DEPARTURE = 0.15
"""Relative standard deviation of a true curve from a straight line. Published curves are up to 32 % off a line."""

RANGE = log(16.0)
"""Departures at sizes whose logarithms are this far apart have a correlation of 1/e."""

UNKNOWN = 10.0
"""Standard deviation of the logarithms of latency and rate before anything is measured."""

P95 = NormalDist().inv_cdf(0.95)


def noise_of_points(points: tuple[Point, ...], least: float = 0.0) -> list[float]:
    """Relative standard deviation of every point: from the misses near it or from its samples, whichever is larger.

    Args:
        points: sorted by size.
        least: lower bound for a point that does not say how its samples spread.
    """
    misses = [value for value in residuals(points) if value is not None]
    found = []
    for number, point in enumerate(points):
        first = min(max(number - 1 - NEIGHBOURS, 0), max(len(misses) - 2 * NEIGHBOURS, 0))
        near = misses[first : first + 2 * NEIGHBOURS]
        noise = max(noise_of_misses(near), noise_of_samples(point.p50_us, point.p95_us, point.samples))
        found.append(max(noise, least) if point.p95_us is None else noise)
    return found


def noise_of_misses(misses: Sequence[float]) -> float:
    """Noise of one point, from the root mean square of leave-one-out misses; 0 without misses. A miss contains the
    noise of the point and that of the mean of its two neighbours."""
    return sqrt(sum(log1p(max(value, -0.9)) ** 2 for value in misses) / max(len(misses), 1) / 1.5)


def noise_of_samples(p50_us: float, p95_us: float | None, samples: int) -> float:
    """Standard deviation of the logarithm of a median, from the spread of its samples; 0 if the spread is not known."""
    if p95_us is None or p95_us <= p50_us:
        return 0.0
    return log(p95_us / p50_us) / P95 / sqrt(min(samples, INDEPENDENT))


@lru_cache(maxsize=256)
def posterior(points: tuple[Point, ...], least: float = 0.0) -> tuple[numpy.ndarray, numpy.ndarray]:
    """The distribution of the logarithms of true over measured times.

    Args:
        points: the n points of one curve, sorted by size.
        least: least noise of points that do not say how their samples spread.

    Returns:
        The mean (float64, shape ``[n]``) and a factor (float64, shape ``[n, n]``): mean + factor @ z with n standard
        normal numbers z is a draw.
    """
    noise = numpy.maximum(noise_of_points(points, least), 1e-9)
    if len(points) < 3:
        return numpy.zeros(len(points)), numpy.diag(noise)
    size = numpy.array([float(point.size_bytes) for point in points])
    us = numpy.array([point.p50_us for point in points])
    line = _line(size, us)
    far = numpy.abs(numpy.log(numpy.maximum(size, 1.0))[:, None] - numpy.log(numpy.maximum(size, 1.0))[None, :])
    terms = line / line.sum(axis=0)  # how much an error of latency or rate moves each point
    prior = DEPARTURE**2 * numpy.exp(-far / RANGE) + UNKNOWN**2 * terms.T @ terms
    return _of_normal(numpy.log(us / line.sum(axis=0)), prior, noise)


@lru_cache(maxsize=256)
def posterior_of_likes(times_us: tuple[float, ...], noise: tuple[float, ...]) -> tuple[numpy.ndarray, numpy.ndarray]:
    """As :func:`posterior`, for times that are alike, such as those of the chunks of one model. The true times are
    taken to differ by as much as their spread exceeds their noise, and by at least :data:`DEPARTURE`."""
    logs, noises = numpy.log(times_us), numpy.maximum(noise, 1e-9)
    spread = logs.var(ddof=1) - (noises**2).mean() if len(logs) > 1 else 0.0
    prior = max(spread, DEPARTURE**2) * numpy.eye(len(logs)) + UNKNOWN**2
    return _of_normal(logs - logs.mean(), prior, noises)


def _of_normal(
    values: numpy.ndarray, prior: numpy.ndarray, noise: numpy.ndarray
) -> tuple[numpy.ndarray, numpy.ndarray]:
    """Mean and factor of the true values minus ``values``, for a normal prior (a covariance) and independent noise."""
    gain = numpy.linalg.solve(prior + numpy.diag(noise**2), prior).T
    spread = prior - gain @ prior
    value, vector = numpy.linalg.eigh((spread + spread.T) / 2)
    return gain @ values - values, vector * numpy.sqrt(numpy.maximum(value, 0.0))


def _line(size: numpy.ndarray, us: numpy.ndarray) -> numpy.ndarray:
    """Latency and time of the bytes at every size (shape ``[2, n]``), from least squares of relative misses."""
    terms = numpy.stack([numpy.ones_like(size), size])
    scale = terms.max(axis=1)
    found, *_ = numpy.linalg.lstsq((terms / scale[:, None] / us).T, numpy.ones_like(us), rcond=None)
    found = numpy.maximum(found, [us.min() * 1e-3, us.min() * 1e-3])
    return terms * (found / scale)[:, None]
