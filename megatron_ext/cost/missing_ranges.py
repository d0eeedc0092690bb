"""Figures that a cost table lacks and that a prediction takes from a range.

[Note: What stands for a missing figure]
A missing figure is never taken as exactly 1.0 or 0. Either it has a range here, based on what is known about it, or it
is refused by name (planner/missing_figures.py), because nothing says how long the operation of a missing curve takes.
The ranges:

* a pair of activities without a row of contention: from no slowdown to that of two on one link
* the time of a call: from 0 to the slow end of the data sheets, or to the shortest all-gather, which contains a call
* launches, where layers were measured on a device: from 0 to the slow end of the data sheets
* the bandwidth of host memory: from no limit to the fastest that one activity alone reads and writes
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from typing import NamedTuple

from msgspec.structs import replace

from megatron_ext.cost.cost_table import ESTIMATE, Compute, Contention, CostTable, HostMemory, Launches
from megatron_ext.cost.curve import curves_of, points_of

TRANSFERS = ("gpu", "cpu", "nvme", "publish", "reduce")
COLLECTIVES = ("gpu", "reduce")
ON_HOST = {"cpu", "nvme", "publish", "host_step", "host_add"}
"""Activities that move bytes in host memory."""

MOST_BESIDE_TRANSFERS = 1.3
"""Largest slowdown of two transfers without a row of contention; the range begins at no slowdown. An all-gather loses 8
to 11 % under host copies."""
MOST_BESIDE_COMPUTE = 1.1
"""The same for a transfer during compute, and for compute during a collective, whose kernels take processors of the
GPU."""
MOST_BESIDE_COPIES = 1.03
"""The same for compute during a host copy: a PCIe link has about 2 % of the device memory's bandwidth."""

MOST_ON_ONE_LINK = 2.0
"""Slowdown of two transfers that share one link evenly. One pair in five without a row is slowed down more than
usual."""

USUAL = 0.8
"""Share of the measured pairs that are slowed down by about as much as a pair without a row may be. The others share a
link."""

MOST_LAUNCH_US = 1500.0
"""Longest time to launch one layer's forward, or its backward, from Python, if it was not measured: the slow end of the
data sheets."""
MOST_TENSOR_US = 120.0
"""The same for the time that the optimizer spends on one parameter."""
MOST_CALL_US = 30.0
"""The same for a call of ``torch.distributed``."""

CONTENTION, MISSING_CONTENTION, CALL = "contention", "missing contention rows", "group_overhead.call_us"
LAUNCHES, MEMORY = "launches", "host_memory"
"""Names of costs that are not curves."""


class MissingRange(NamedTuple):
    """Attributes:
    cost: name of the cost.
    text: the missing figure and the range that is used for it.
    put: returns the table with this cost, at the part of the range (0 to 1) that each call of the second argument
        gives.
    """

    cost: str
    text: str
    put: Callable[[CostTable, Callable[[], float]], CostTable]


def missing_ranges(table: CostTable, kinds: Sequence[str]) -> list[MissingRange]:
    """The figures that ``table`` lacks for a prediction with activities of ``kinds``, in the order in which they are
    added."""
    of_table = *_call(table), *_launches_of_layers(table), *_launches_of_parameters(table)
    return [*_contention(table, kinds), *of_table, *_host_memory(table, kinds)]


# -- contention -----------------------------------------------------------------------------


def most_excess(measured: str, busy: str) -> float:
    """The relative slowdown that a pair may have if it was not measured."""
    if measured == "compute":
        return (MOST_BESIDE_COMPUTE if busy in COLLECTIVES else MOST_BESIDE_COPIES) - 1
    return (MOST_BESIDE_COMPUTE if busy == "compute" else MOST_BESIDE_TRANSFERS) - 1


def _excess(measured: str, busy: str, part: float) -> float:
    """The excess of a pair without a row at ``part`` (0 to 1) of its range."""
    usual = most_excess(measured, busy)
    if "compute" in (measured, busy):
        return usual * part
    rest = MOST_ON_ONE_LINK - 1 - usual
    return usual * min(part / USUAL, 1.0) + rest * max(part - USUAL, 0.0) / (1 - USUAL)


def _contention(table: CostTable, kinds: Sequence[str]) -> Iterator[MissingRange]:
    """Pairs of activities that occur, can overlap and have no row. Some pairs need no row. Collectives of one rank run
    one after the other on one communicator, or share the network. Transfers on one link of the host, or on a shared
    PCIe link, have rules of their own. Work of the host's processors shares host memory with copies, and does not
    affect compute."""
    present = {(row.measured, row.busy) for row in table.contention}
    if table.topology.nic_shares_pcie:
        present |= {("gpu", "cpu"), ("cpu", "gpu")}
    present |= {("gpu", "reduce"), ("reduce", "gpu")}
    by_most: dict[float, list[tuple[str, str]]] = {}
    for pair in product(("compute", *TRANSFERS, "p2p"), ("compute", *TRANSFERS)):
        if pair[0] != pair[1] and set(kinds).issuperset(pair) and pair not in present:
            by_most.setdefault(1 + _excess(*pair, 1.0), []).append(pair)
    for most, pairs in sorted(by_most.items()):
        said = f"contention, taken as 1.0 to {most:g}: {', '.join(map('{0[0]} while {0[1]} is busy'.format, pairs))}"
        yield MissingRange(MISSING_CONTENTION, said, partial(_with_rows, pairs))


def _with_rows(pairs: list[tuple[str, str]], table: CostTable, part: Callable[[], float]) -> CostTable:
    rows = [Contention(measured=a, busy=b, slowdown=1 + _excess(a, b, part())) for a, b in pairs]
    return replace(table, contention=(*table.contention, *rows))


# -- the training thread --------------------------------------------------------------------


def _call(table: CostTable) -> Iterator[MissingRange]:
    given = table.group_overhead
    times = [point.p50_us for points in curves_of(table.routes.gpu or ()).values() for point in points]
    most = max(min(times, default=0.0), MOST_CALL_US)
    put = lambda table, part: replace(table, group_overhead=replace(given, call_us=most * part()))
    if given.call_us is None:
        yield MissingRange(CALL, f"{CALL}, taken as 0 to {most:.1f} us", put)


def _known(row: Compute) -> bool:
    return row.forward_launch_us is not None and row.backward_launch_us is not None


def _launches_of_layers(table: CostTable) -> Iterator[MissingRange]:
    """Launches of layers, if layers were measured on a device or estimated for one. The launches of a chunk are those
    of as many layers as its time is worth."""
    source, kinds = table.metadata.source, {row.layer_kind: row.forward_us for row in table.compute if row.layer_kind}
    of_device = (table.metadata.software or {}).get("backend") == "nccl" or (source and source.program == ESTIMATE)
    if not of_device or not kinds or all(map(_known, table.compute)):
        return
    of_layer = kinds.get("transformer") or max(kinds.values())

    def put(table: CostTable, part: Callable[[], float]) -> CostTable:
        rows, of_one = [], MOST_LAUNCH_US * part()
        for row in table.compute:
            us = of_one if row.layer_kind else of_one * max(row.forward_us / of_layer, 1.0)
            rows.append(row if _known(row) else replace(row, forward_launch_us=us, backward_launch_us=us))
        return replace(table, compute=tuple(rows))

    yield MissingRange(LAUNCHES, f"{LAUNCHES} of a layer, taken as 0 to {MOST_LAUNCH_US:g} us", put)


def _launches_of_parameters(table: CostTable) -> Iterator[MissingRange]:
    """Launches of reduces and of the optimizer, if launches of layers are known or missing."""

    def put(table: CostTable, part: Callable[[], float]) -> CostTable:
        share, call_us = part(), table.group_overhead.call_us or 0.0
        return replace(table, launches=Launches(reduce_us=call_us * share, tensor_us=MOST_TENSOR_US * share))

    if table.launches is None and (any(map(_known, table.compute)) or [*_launches_of_layers(table)]):
        said = f"{LAUNCHES} of a parameter of the optimizer, taken as 0 to {MOST_TENSOR_US:g} us"
        yield MissingRange(LAUNCHES, said, put)


# -- host memory ----------------------------------------------------------------------------


def _host_memory(table: CostTable, kinds: Sequence[str]) -> Iterator[MissingRange]:
    """The bandwidth of host memory is at least what one activity moves when it runs alone: a copy moves each byte once,
    an addition moves three. Curves are read at their largest size, because small sizes fit into caches."""
    moved = [(1, table.routes.cpu), (1, table.routes.nvme), (3, table.host_add)]
    rates = [by * last.size_bytes / last.p50_us for by, curve in moved for last in points_of(curve)[-1:]]
    if table.host_memory is None and rates and not ON_HOST.isdisjoint(kinds):
        least = 1e6 * max(rates)
        memory = lambda share: HostMemory(bytes_per_s=least / share) if share else None
        put = lambda table, part: replace(table, host_memory=memory(part()))
        yield MissingRange(MEMORY, f"{MEMORY}, taken as {least / 1e9:.1f} GB/s or more", put)
