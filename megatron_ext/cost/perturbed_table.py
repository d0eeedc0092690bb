"""Cost tables that differ from a given one as far as its figures may be wrong.

[Note: How a table is perturbed]
* Every curve has one factor of its own: a machine that was slow while a curve was measured moves all of it.
* Its points are drawn from where the true curve may lie (:mod:`megatron_ext.cost.true_curve`).
* A figure that does not say how much it wavers is taken to waver as the table's curves do.
* Times of the same computation in the chunks of one model are alike: what wavers much moves towards their mean.
* Nothing runs faster beside other work than alone, and most runs little slower: a large slowdown is believed as far as
  its noise allows.
* What the table lacks is drawn from a range, and named: a pair of activities without a row of contention, and the time
  of a call. It is never taken as exactly 1.0 or 0. A curve that is missing is refused (planner/missing_figures.py).
Factors are log-normal.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from math import exp, log, sqrt
from statistics import NormalDist, median

import numpy
from msgspec.structs import replace

from megatron_ext.cost.cost_table import (
    CURVES,
    ESTIMATE,
    Compute,
    Contention,
    CostTable,
    Curve,
    HostMemory,
    Launches,
    Point,
    part_named,
    with_curves,
    with_points,
)
from megatron_ext.cost.curve import curves_of, residuals
from megatron_ext.cost.true_curve import P95, noise_of_misses, noise_of_samples, posterior, posterior_of_likes

SYSTEMATIC = 0.05
"""Standard deviation of what all figures of one curve are off by together, beyond what their own noise explains. It was
4 % between two measurements in a row on the CPU test bench."""

TRANSFERS = ("gpu", "cpu", "nvme", "publish", "reduce")
ON_HOST = ("host_step", "host_add")
"""What the host's processors do: it shares host memory with copies, and leaves compute alone."""
COLLECTIVES = ("gpu", "reduce")

MOST_BESIDE_TRANSFERS = 1.3
"""Two transfers without a row of contention: from no slowdown to this. An all-gather loses 8 to 11 % under host
copies."""
MOST_BESIDE_COMPUTE = 1.1
"""The same for a transfer during compute, and for compute beside a collective, whose kernels take processors of the
GPU."""
MOST_BESIDE_COPIES = 1.03
"""The same for compute beside a host copy: a PCIe link has some 2 % of the device memory's bandwidth."""

MOST_ON_ONE_LINK = 2.0
"""Two transfers that share one link evenly. One pair in five without a row lies above what is usual."""

USUAL, SELDOM = 0.8, log(2.0)
"""Part of the measured pairs that slow down by about as much as a pair without a row may; mean logarithm of the others,
which share a link."""

MOST_LAUNCH_US = 1500.0
"""Launching one layer's forward, or its backward, from Python, where it was not measured: the slow end of the data
sheets."""
MOST_TENSOR_US = 120.0
"""The same for the optimizer's visit of one parameter."""

OF_ROUGHNESS = ("routes", "publish", "reduce", "optimizer", "p2p")
"""Curves that say how rough a table is."""

CONTENTION, MISSING_CONTENTION, CALL = "contention", "missing contention rows", "group_overhead.call_us"
LAUNCHES = "launches"
"""Names of costs that are no curve."""


class PerturbedTables:
    """Tables drawn around ``table``.

    Args:
        kinds: activities that occur, by the names of ``contention``; others need no row.

    Attributes:
        costs: by number of :meth:`table`'s input, the name of the cost that it moves.
        missing: what the table lacks and how it is taken, one text each.
    """

    def __init__(self, table: CostTable, kinds: Sequence[str]):
        self._table, self._noise = table, roughness(table)
        self._pairs = _missing_pairs(table, kinds)
        self.costs: list[str] = []
        self.missing = self._describe_missing()
        self._rebuild(self._record)

    @property
    def size(self) -> int:
        """How many numbers one table takes."""
        return len(self.costs)

    def table(self, numbers: Sequence[float]) -> CostTable:
        """The table of ``numbers`` (standard normal, one a name of :attr:`costs`)."""
        given = iter(numbers)
        return self._rebuild(lambda cost: float(next(given)))

    def shifted(self, cost: str, by: float) -> CostTable:
        """The table with every figure of one cost ``by`` standard deviations off."""
        return self._rebuild(lambda name: by if name == cost else 0.0)

    def draw(self, count: int, seed: int = 0) -> list[CostTable]:
        """``count`` tables by Latin hypercube sampling (McKay, Beckman and Conover 1979): every figure takes each of
        ``count`` equally likely parts of its distribution once."""
        return [self.table(row) for row in latin_hypercube(count, self.size, seed)]

    def _record(self, cost: str) -> float:
        self.costs.append(cost)
        return 0.0

    def _describe_missing(self) -> tuple[str, ...]:
        by_most: dict[float, list[str]] = {}
        for measured, busy in self._pairs:
            by_most.setdefault(1 + _missing_excess(measured, busy, 1.0), []).append(f"{measured} beside {busy}")
        found = [f"contention, taken as 1.0 to {most:g}: {', '.join(pairs)}" for most, pairs in sorted(by_most.items())]
        if self._most_call_us() is not None:
            found.append(f"{CALL}, taken as 0 to {self._most_call_us():.1f} us")
        if self._lacks_launches:
            found.append(f"{LAUNCHES} of a layer, taken as 0 to {MOST_LAUNCH_US:g} us")
        if self._lacks_calls:
            found.append(f"{LAUNCHES} of a parameter of the optimizer, taken as 0 to {MOST_TENSOR_US:g} us")
        return tuple(found)

    def with_missing_at(self, part: float) -> CostTable:
        """The given table with every slowdown and call that it lacks at ``part`` (0 to 1) of its range."""
        rows = self._missing_rows(lambda: part)
        call_us, most = self._table.group_overhead.call_us, self._most_call_us()
        overhead = replace(self._table.group_overhead, call_us=call_us if most is None else most * part)
        table = replace(self._table, contention=(*self._table.contention, *rows), group_overhead=overhead)
        return self._launched(table, part)

    def _missing_rows(self, part: Callable[[], float]) -> list[Contention]:
        return [Contention(measured=a, busy=b, slowdown=1 + _missing_excess(a, b, part())) for a, b in self._pairs]

    # -- one table --------------------------------------------------------------------------

    def _rebuild(self, number: Callable[[str], float]) -> CostTable:
        """Visit every uncertain figure in one order; ``number(cost)`` says how many standard deviations it is off."""
        made = replace(
            with_curves(self._table, lambda name, curve: self._curve(curve, name, number)),
            compute=self._compute(number),
            contention=self._contention(number),
            group_overhead=replace(self._table.group_overhead, call_us=self._call_us(number)),
            host_memory=self._host_memory(number),
        )
        return self._with_launches(made, number)

    def _curve(self, curve: Curve, name: str, number: Callable[[str], float]) -> Curve:
        if name == "all_reduce":  # no plan looks it up
            return curve
        own = {"points": name}  # the cost of the curve's own points has its name
        return with_points(curve, lambda field, points: self._points(points, own.get(field, f"{name}.{field}"), number))

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
        """Rows of one pair move together: they come from one measurement beside one busy link."""
        # A slowdown is the quotient of two times, each as rough as the curves.
        spread = sqrt(SYSTEMATIC**2 + 2 * self._noise**2)
        given = self._table.contention
        numbers = {pair: number(CONTENTION) for pair in dict.fromkeys((row.measured, row.busy) for row in given)}
        rows = [replace(row, slowdown=_slowdown(row, spread, numbers[row.measured, row.busy])) for row in given]
        return *rows, *self._missing_rows(lambda: _part(number(MISSING_CONTENTION)))

    def _call_us(self, number: Callable[[str], float]) -> float | None:
        given, most = self._table.group_overhead.call_us, self._most_call_us()
        if given:
            return given * exp(number(CALL) * sqrt(SYSTEMATIC**2 + self._noise**2))
        return given if most is None else most * _part(number(CALL))

    def _most_call_us(self) -> float | None:
        """Where the time of a call is missing: the smallest all-gather's own time contains it."""
        gpu = self._table.routes.gpu
        if self._table.group_overhead.call_us is not None or gpu is None:
            return None
        times = [point.p50_us for points in curves_of(gpu).values() for point in points]
        return min(times, default=None)

    def _with_launches(self, table: CostTable, number: Callable[[str], float]) -> CostTable:
        """All launches move together: one thread makes them."""
        if self._lacks_launches:
            return self._launched(table, _part(number(LAUNCHES)))
        if all(row.forward_launch_us is None for row in table.compute):
            return table
        if self._lacks_calls:
            table = self._launched(table, _part(number(LAUNCHES)))
        launches = table.launches or Launches(reduce_us=0.0, tensor_us=0.0)
        factor = exp(number(LAUNCHES) * sqrt(SYSTEMATIC**2 + (log(launches.slowest) / P95) ** 2))
        names = ("forward_launch_us", "backward_launch_us")
        rows = [
            replace(row, **{name: us * factor for name in names if (us := getattr(row, name)) is not None})
            for row in table.compute
        ]
        own = replace(launches, reduce_us=launches.reduce_us * factor, tensor_us=launches.tensor_us * factor)
        return replace(table, compute=tuple(rows), launches=own)

    @property
    def _lacks_launches(self) -> bool:
        """Layers were measured on a device, or estimated of one, and what launching one of them takes was not."""
        metadata, source = self._table.metadata, self._table.metadata.source
        estimated = source is not None and source.program == ESTIMATE
        of_device = (metadata.software or {}).get("backend") == "nccl" or estimated
        rows = self._table.compute
        return of_device and any(row.layer_kind for row in rows) and not all(map(_launches_known, rows))

    @property
    def _lacks_calls(self) -> bool:
        """What launches of layers are known or lacking, and those of reduces and of the optimizer are not."""
        known = any(row.forward_launch_us is not None for row in self._table.compute)
        return self._table.launches is None and (known or self._lacks_launches)

    def _launched(self, table: CostTable, part: float) -> CostTable:
        """The table with the launches that it lacks at ``part`` of their range. A chunk's are those of as many layers
        as it takes the time of."""
        if self._lacks_calls:
            call_us = table.group_overhead.call_us or 0.0
            table = replace(table, launches=Launches(reduce_us=call_us * part, tensor_us=MOST_TENSOR_US * part))
        if not self._lacks_launches:
            return table
        kinds = {row.layer_kind: row.forward_us for row in table.compute if row.layer_kind is not None}
        of_layer = kinds.get("transformer") or max(kinds.values())
        rows = []
        for row in table.compute:
            layers = max(row.forward_us / of_layer, 1.0) if row.layer_kind is None else 1.0
            us = MOST_LAUNCH_US * part * layers
            rows.append(row if _launches_known(row) else replace(row, forward_launch_us=us, backward_launch_us=us))
        return replace(table, compute=tuple(rows))

    def _host_memory(self, number: Callable[[str], float]) -> HostMemory | None:
        memory = self._table.host_memory
        if memory is None:
            return None
        slow = memory.slow_bytes_per_s or memory.bytes_per_s
        spread = sqrt(SYSTEMATIC**2 + (log(memory.bytes_per_s / slow) / P95) ** 2)
        return HostMemory(bytes_per_s=memory.bytes_per_s * exp(number("host_memory") * spread))


def _launches_known(row: Compute) -> bool:
    return row.forward_launch_us is not None and row.backward_launch_us is not None


def roughness(table: CostTable) -> float:
    """By how much the points of this table's curves waver, relative (one standard deviation): the median over curves
    of the root mean square of what their points miss by when they are read from their neighbours."""
    found = []
    for name in (name for name in CURVES if name.partition(".")[0] in OF_ROUGHNESS):
        for points in curves_of(part_named(table, name) or ()).values():
            misses = [value for value in residuals(points) if value is not None]
            if misses:
                found.append(noise_of_misses(misses))
    return median(found) if found else SYSTEMATIC


def latin_hypercube(count: int, dimensions: int, seed: int = 0) -> numpy.ndarray:
    """``count`` standard normal vectors, in each dimension one of every ``count``-th part of the distribution."""
    draw = numpy.random.default_rng(seed)
    order = draw.permuted(numpy.tile(numpy.arange(count), (dimensions, 1)), axis=1).T
    uniform = (order + draw.random((count, dimensions))) / count
    inverse = numpy.vectorize(NormalDist().inv_cdf, otypes=[float])
    return inverse(numpy.clip(uniform, 1e-9, 1 - 1e-9)) if uniform.size else uniform


def _slowdown(row: Contention, spread: float, number: float) -> float:
    """A true slowdown, given a measured one whose logarithm has this spread; ``number`` standard normal."""
    logs, below = _where_slowdown_lies(log(row.slowdown), spread, log(1 + _most_excess(row.measured, row.busy)))
    return exp(float(numpy.interp(_part(number), below, logs)))


@lru_cache(maxsize=256)
def _where_slowdown_lies(measured: float, spread: float, usual: float) -> tuple[numpy.ndarray, numpy.ndarray]:
    """Logarithms of slowdowns, and how likely the true one is below each (Bayes): :data:`USUAL` of the pairs slow down
    by about what a pair without a row may, the others by more, exponentially distributed. None exceeds what was
    measured and what a pair without a row may."""
    logs = numpy.linspace(0.0, max(measured, usual), 400)
    prior = sum(part * numpy.exp(-logs / mean) / mean for part, mean in ((USUAL, usual), (1 - USUAL, SELDOM)))
    density = prior * numpy.exp(-((logs - measured) ** 2) / (2 * spread**2))
    below = numpy.cumsum((density[1:] + density[:-1]) / 2)
    return logs, numpy.concatenate(([0.0], below / below[-1]))


def _part(number: float) -> float:
    """A standard normal number as a part of a range, 0 to 1."""
    return NormalDist().cdf(number)


def _most_excess(measured: str, busy: str) -> float:
    """By how much a pair may slow down where it was not measured, relative."""
    if measured == "compute":
        return (MOST_BESIDE_COMPUTE if busy in COLLECTIVES else MOST_BESIDE_COPIES) - 1
    return (MOST_BESIDE_COMPUTE if busy == "compute" else MOST_BESIDE_TRANSFERS) - 1


def _missing_excess(measured: str, busy: str, part: float) -> float:
    """The excess of a pair without a row at ``part`` (0 to 1) of its range."""
    usual = _most_excess(measured, busy)
    if "compute" in (measured, busy):
        return usual * part
    rest = MOST_ON_ONE_LINK - 1 - usual
    return usual * min(part / USUAL, 1.0) + rest * max(part - USUAL, 0.0) / (1 - USUAL)


def _missing_pairs(table: CostTable, kinds: Sequence[str]) -> list[tuple[str, str]]:
    """Pairs of activities that occur, can overlap and have no row. Collectives of one rank follow each other on one
    communicator, or share the network; transfers on one link of the host, or on a shared PCIe link, have their own
    rules."""
    present = {(row.measured, row.busy) for row in table.contention}
    if table.topology.nic_shares_pcie:
        present |= {("gpu", "cpu"), ("cpu", "gpu")}
    present |= {("gpu", "reduce"), ("reduce", "gpu")}
    on_host = ON_HOST if table.host_memory is None else ()
    return [
        (measured, busy)
        for measured in ("compute", *TRANSFERS, "p2p", *on_host)
        for busy in ("compute", *TRANSFERS, *on_host)
        if measured != busy and {measured, busy} <= set(kinds) and (measured, busy) not in present
    ]
