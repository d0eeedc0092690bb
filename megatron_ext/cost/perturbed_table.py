"""Cost tables that differ from a given table by as much as its figures may be wrong.

[Note: How a table is perturbed]
* Every curve has one factor of its own: a machine that was slow while a curve was measured moves all of it.
* The points of a curve are drawn from where the true curve may lie (:mod:`megatron_ext.cost.true_curve`).
* A figure whose noise is not known gets the noise of the table's curves.
* Times of the same computation in the chunks of one model are alike: times with much noise move towards their mean.
* No operation runs faster next to other work than alone, and most run only a little slower. So a large measured
  slowdown is drawn smaller, the more the larger its noise.
* Figures that the table lacks are drawn from a range, and named (:mod:`megatron_ext.cost.missing_ranges`).
Factors are log-normal.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from math import exp, log, sqrt
from statistics import NormalDist, median

import numpy
from msgspec.structs import replace

from megatron_ext.cost import cost_table as cost
from megatron_ext.cost.cost_table import Compute, Contention, CostTable, Curve, HostMemory, Point
from megatron_ext.cost.curve import curves_of, residuals
from megatron_ext.cost.missing_ranges import CALL, CONTENTION, LAUNCHES, MEMORY, USUAL, missing_ranges, most_excess
from megatron_ext.cost.scaled_table import scaled_launches
from megatron_ext.cost.true_curve import P95, noise_of_misses, noise_of_samples, posterior, posterior_of_likes

SYSTEMATIC = 0.05
"""Standard deviation of the relative error that all figures of one curve share, in addition to their own noise. It was
4 % between two measurements in a row on the CPU test bench."""

OF_ROUGHNESS = ("routes", "publish", "reduce", "optimizer", "p2p")
"""Curves whose scatter gives the roughness of a table."""

SELDOM = log(2.0)
"""Mean logarithm of the slowdowns of pairs that share a link."""


class PerturbedTables:
    """Tables drawn around ``table``.

    Args:
        kinds: activities that occur, with the names of ``contention``. Other activities need no row.

    Attributes:
        costs: for each number in the input of :meth:`table`, the name of the cost that it moves.
        missing: one text for each figure that the table lacks: what it is, and which range is assumed.
    """

    def __init__(self, table: CostTable, kinds: Sequence[str]):
        self._table, self._noise = table, roughness(table)
        self._ranges = missing_ranges(table, kinds)
        self.missing = tuple(each.text for each in self._ranges)
        self.costs: list[str] = []
        self._rebuild(self._record)

    def table(self, numbers: Sequence[float]) -> CostTable:
        """The table for ``numbers`` (standard normal, one for each name in :attr:`costs`)."""
        given = iter(numbers)
        return self._rebuild(lambda cost: float(next(given)))

    def shifted(self, cost: str, by: float) -> CostTable:
        """The table with every figure of one cost ``by`` standard deviations off."""
        return self._rebuild(lambda name: by if name == cost else 0.0)

    def draw(self, count: int) -> list[CostTable]:
        """``count`` tables by Latin hypercube sampling (McKay, Beckman and Conover 1979): the distribution of every
        figure is divided into ``count`` equally likely parts, and each part is drawn once."""
        return [self.table(row) for row in latin_hypercube(count, len(self.costs))]

    def _record(self, cost: str) -> float:
        self.costs.append(cost)
        return 0.0

    def with_missing_at(self, part: float) -> CostTable:
        """The given table with every figure that it lacks at ``part`` (0 to 1) of the figure's range."""
        return self._filled(self._table, lambda _: part)

    def _filled(self, table: CostTable, part: Callable[[str], float]) -> CostTable:
        for each in self._ranges:
            table = each.put(table, lambda cost=each.cost: part(cost))
        return table

    # -- one table --------------------------------------------------------------------------

    def _rebuild(self, number: Callable[[str], float]) -> CostTable:
        """Visit every uncertain figure in one order; ``number(cost)`` says how many standard deviations it is off."""
        made = replace(
            cost.with_curves(self._table, lambda name, curve: self._curve(curve, name, number)),
            compute=self._compute(number),
            contention=self._contention(number),
            group_overhead=replace(self._table.group_overhead, call_us=self._call_us(number)),
            host_memory=self._host_memory(number),
        )
        return self._filled(self._with_launches(made, number), lambda name: _part(number(name)))

    def _curve(self, curve: Curve, name: str, number: Callable[[str], float]) -> Curve:
        if name == "all_reduce":  # no plan looks it up
            return curve
        own = {"points": name}  # the cost of the curve's own points has its name
        draw = lambda field, points: self._points(points, own.get(field, f"{name}.{field}"), number)
        return cost.with_points(curve, draw)

    def _points(self, points: tuple[Point, ...], name: str, number: Callable[[str], float]) -> tuple[Point, ...]:
        if not points:
            return points
        mean, factor = posterior(points, self._noise)
        together = number(name) * SYSTEMATIC
        factors = numpy.exp(together + mean + factor @ numpy.array([number(name) for _ in points])).tolist()
        return tuple(
            Point(size_bytes=p.size_bytes, p50_us=p.p50_us * by, issued_us=p.issued_us and p.issued_us * by)
            for p, by in zip(points, factors)
        )

    def _compute(self, number: Callable[[str], float]) -> tuple[Compute, ...]:
        if not self._table.compute:
            return ()
        rows, together = list(self._table.compute), number("compute") * SYSTEMATIC
        for name in ("forward", "backward"):
            times = [(getattr(row, f"{name}_us"), getattr(row, f"{name}_p95_us"), row.samples) for row in rows]
            noise = tuple(self._noise if p95 is None else noise_of_samples(us, p95, count) for us, p95, count in times)
            mean, factor = posterior_of_likes(tuple(us for us, _, _ in times), noise)
            factors = numpy.exp(together + mean + factor @ numpy.array([number("compute") for _ in rows])).tolist()
            rows = [replace(row, **{f"{name}_us": us * by}) for row, (us, _, _), by in zip(rows, times, factors)]
        return tuple(rows)

    def _contention(self, number: Callable[[str], float]) -> tuple[Contention, ...]:
        """Rows of one pair move together: they come from one measurement next to one busy link."""
        # A slowdown is the quotient of two times, each as rough as the curves.
        spread = sqrt(SYSTEMATIC**2 + 2 * self._noise**2)
        given = self._table.contention
        numbers = {pair: number(CONTENTION) for pair in dict.fromkeys((row.measured, row.busy) for row in given)}
        return tuple(replace(row, slowdown=_slowdown(row, spread, numbers[row.measured, row.busy])) for row in given)

    def _call_us(self, number: Callable[[str], float]) -> float | None:
        given = self._table.group_overhead.call_us
        return given and given * exp(number(CALL) * sqrt(SYSTEMATIC**2 + self._noise**2))

    def _with_launches(self, table: CostTable, number: Callable[[str], float]) -> CostTable:
        """All launches move together, because one thread makes them."""
        launches = table.launches
        if launches is None and all(row.forward_launch_us is row.backward_launch_us is None for row in table.compute):
            return table
        slowest = launches.slowest if launches is not None else 1.0
        return scaled_launches(table, exp(number(LAUNCHES) * sqrt(SYSTEMATIC**2 + (log(slowest) / P95) ** 2)))

    def _host_memory(self, number: Callable[[str], float]) -> HostMemory | None:
        memory = self._table.host_memory
        if memory is None:
            return None
        slow = memory.slow_bytes_per_s or memory.bytes_per_s
        spread = sqrt(SYSTEMATIC**2 + (log(memory.bytes_per_s / slow) / P95) ** 2)
        return HostMemory(bytes_per_s=memory.bytes_per_s * exp(number(MEMORY) * spread))


def roughness(table: CostTable) -> float:
    """Relative noise of this table's points (one standard deviation). For each curve, every point is read from its
    neighbours; the curve's noise is the root mean square of these misses. The result is the median over curves."""
    found = []
    for name in (name for name in cost.CURVES if name.partition(".")[0] in OF_ROUGHNESS):
        for points in curves_of(cost.part_named(table, name) or ()).values():
            misses = [value for value in residuals(points) if value is not None]
            if misses:
                found.append(noise_of_misses(misses))
    return median(found) if found else SYSTEMATIC


def latin_hypercube(count: int, dimensions: int, seed: int = 0) -> numpy.ndarray:
    """``count`` standard normal vectors (shape ``[count, dimensions]``). In each dimension every one of ``count``
    equally likely parts of the distribution is drawn once."""
    draw = numpy.random.default_rng(seed)
    order = draw.permuted(numpy.tile(numpy.arange(count), (dimensions, 1)), axis=1).T
    uniform = (order + draw.random((count, dimensions))) / count
    inverse = numpy.vectorize(NormalDist().inv_cdf, otypes=[float])
    return inverse(numpy.clip(uniform, 1e-9, 1 - 1e-9)) if uniform.size else uniform


def _slowdown(row: Contention, spread: float, number: float) -> float:
    """A draw of the true slowdown, given a measured one whose logarithm has standard deviation ``spread``; ``number``
    is standard normal."""
    logs, below = _where_slowdown_lies(log(row.slowdown), spread, log(1 + most_excess(row.measured, row.busy)))
    return exp(float(numpy.interp(_part(number), below, logs)))


@lru_cache(maxsize=256)
def _where_slowdown_lies(measured: float, spread: float, usual: float) -> tuple[numpy.ndarray, numpy.ndarray]:
    """Logarithms of slowdowns, and the probability that the true one is below each (Bayes). In the prior, the share
    :data:`USUAL` of pairs slows down by about as much as a pair without a row may, and the others by more, both
    exponentially distributed. No slowdown exceeds the larger of the measured one and that of a pair without a row."""
    logs = numpy.linspace(0.0, max(measured, usual), 400)
    prior = sum(part * numpy.exp(-logs / mean) / mean for part, mean in ((USUAL, usual), (1 - USUAL, SELDOM)))
    density = prior * numpy.exp(-((logs - measured) ** 2) / (2 * spread**2))
    below = numpy.cumsum((density[1:] + density[:-1]) / 2)
    return logs, numpy.concatenate(([0.0], below / below[-1]))


def _part(number: float) -> float:
    """Map a standard normal number to a part of a range, 0 to 1."""
    return NormalDist().cdf(number)
