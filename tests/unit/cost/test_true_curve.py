"""The true curve given points that waver: where it lies, and that it lies there as often as is said."""

import random
from math import exp, log

import numpy
import pytest
from msgspec.structs import replace
from planning_cases import line

from megatron_ext.cost.true_curve import P95, noise_of_points, noise_of_samples, posterior

TRUE = line(20.0, 1e4).points[:12]


def noisy(noise: float, seed: int, *, said: bool = False):
    draw = random.Random(seed)
    points = [replace(point, p50_us=point.p50_us * exp(draw.gauss(0, noise))) for point in TRUE]
    return tuple(replace(p, p95_us=p.p50_us * exp(P95 * noise), samples=1) if said else p for p in points)


def test_points_without_noise_stay_where_they_are():
    mean, factor = posterior(tuple(replace(point, p95_us=point.p50_us * 1.001, samples=25) for point in TRUE))
    assert numpy.abs(mean).max() < 0.01 and numpy.linalg.norm(factor, axis=1).max() < 0.06


def test_a_point_that_looked_fast_by_chance_is_not_believed():
    points = list(TRUE)
    points[6] = replace(points[6], p50_us=points[6].p50_us * 0.5)
    mean, _ = posterior(tuple(points))
    assert mean[6] > 0.4 * log(2) and abs(mean[0]) < 0.1


@pytest.mark.parametrize("noise", (0.1, 0.25, 0.4))
@pytest.mark.parametrize("said", (False, True))
def test_the_interval_holds_the_true_times(noise, said):
    inside, widths = [], []
    for seed in range(60):
        points = noisy(noise, seed, said=said)
        mean, factor = posterior(points)
        spread = numpy.linalg.norm(factor, axis=1)
        truth = numpy.log([true.p50_us / seen.p50_us for true, seen in zip(TRUE, points)])
        inside += list(numpy.abs(truth - mean) <= P95 * spread)
        widths += list(spread)
    assert 0.85 <= numpy.mean(inside) <= 0.99
    # Neighbours tell of each other: the curve is known better than one of its points.
    assert numpy.mean(widths) < 0.8 * noise or noise == 0.1


def test_noise_is_what_was_put_in():
    assert numpy.mean([noise_of_points(noisy(0.25, seed)) for seed in range(60)]) == pytest.approx(0.25, rel=0.15)
    assert noise_of_samples(100.0, 100.0 * exp(P95 * 0.4), 1) == pytest.approx(0.4)
    assert noise_of_samples(100.0, 100.0 * exp(P95 * 0.4), 16) == pytest.approx(0.1)


def test_two_points_keep_their_own_noise():
    mean, factor = posterior(tuple(replace(point, p95_us=point.p50_us * exp(P95 * 0.2)) for point in TRUE[:2]))
    assert not mean.any() and factor == pytest.approx(numpy.diag([0.2, 0.2]))
