"""What a cost table lacks and a prediction takes from a range.

[Note: What stands for a missing figure]
A figure that is missing is never taken as exactly 1.0 or 0. It either has a range here, from what is known of it, or is
refused by name (planner/missing_figures.py): nothing says how long the work of a missing curve takes. The ranges:

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
"""What moves bytes in host memory."""

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

USUAL = 0.8
"""Part of the measured pairs that slow down by about as much as a pair without a row may. The others share a link."""

MOST_LAUNCH_US = 1500.0
"""Launching one layer's forward, or its backward, from Python, where it was not measured: the slow end of the data
sheets."""
MOST_TENSOR_US = 120.0
"""The same for the optimizer's visit of one parameter."""
MOST_CALL_US = 30.0
"""The same for a call of ``torch.distributed``."""

CONTENTION, MISSING_CONTENTION, CALL = "contention", "missing contention rows", "group_overhead.call_us"
LAUNCHES, MEMORY = "launches", "host_memory"
"""Names of costs that are no curve."""


class MissingRange(NamedTuple):
    """Attributes:
    cost: its name.
    text: what is missing and how it is taken.
    put: the table with it, at the part of the range (0 to 1) that each call of the second argument gives.
    """

    cost: str
    text: str
    put: Callable[[CostTable, Callable[[], float]], CostTable]


def missing_ranges(table: CostTable, kinds: Sequence[str]) -> list[MissingRange]:
    """What ``table`` lacks of a prediction in which activities of ``kinds`` occur, in the order in which it is put."""
    of_table = *_call(table), *_launches_of_layers(table), *_launches_of_parameters(table)
    return [*_contention(table, kinds), *of_table, *_host_memory(table, kinds)]


# -- contention -----------------------------------------------------------------------------


def most_excess(measured: str, busy: str) -> float:
    """By how much a pair may slow down where it was not measured, relative."""
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
    """Pairs of activities that occur, can overlap and have no row. Collectives of one rank follow each other on one
    communicator, or share the network; transfers on one link of the host, or on a shared PCIe link, have their own
    rules; what the host's processors do shares host memory with copies, and leaves compute alone."""
    present = {(row.measured, row.busy) for row in table.contention}
    if table.topology.nic_shares_pcie:
        present |= {("gpu", "cpu"), ("cpu", "gpu")}
    present |= {("gpu", "reduce"), ("reduce", "gpu")}
    by_most: dict[float, list[tuple[str, str]]] = {}
    for pair in product(("compute", *TRANSFERS, "p2p"), ("compute", *TRANSFERS)):
        if pair[0] != pair[1] and set(kinds).issuperset(pair) and pair not in present:
            by_most.setdefault(1 + _excess(*pair, 1.0), []).append(pair)
    for most, pairs in sorted(by_most.items()):
        said = f"contention, taken as 1.0 to {most:g}: {', '.join(map(' beside '.join, pairs))}"
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
    """Where layers were measured on a device, or estimated of one. A chunk's are those of as many layers as it takes
    the time of."""
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
    """Launches of reduces and of the optimizer, where those of layers are known or lacking."""

    def put(table: CostTable, part: Callable[[], float]) -> CostTable:
        share, call_us = part(), table.group_overhead.call_us or 0.0
        return replace(table, launches=Launches(reduce_us=call_us * share, tensor_us=MOST_TENSOR_US * share))

    if table.launches is None and (any(map(_known, table.compute)) or [*_launches_of_layers(table)]):
        said = f"{LAUNCHES} of a parameter of the optimizer, taken as 0 to {MOST_TENSOR_US:g} us"
        yield MissingRange(LAUNCHES, said, put)


# -- host memory ----------------------------------------------------------------------------


def _host_memory(table: CostTable, kinds: Sequence[str]) -> Iterator[MissingRange]:
    """One activity alone moves at most what it carries: a copy each byte once, adding three. Small sizes lie in
    caches."""
    moved = [(1, table.routes.cpu), (1, table.routes.nvme), (3, table.host_add)]
    rates = [by * last.size_bytes / last.p50_us for by, curve in moved for last in points_of(curve)[-1:]]
    if table.host_memory is None and rates and not ON_HOST.isdisjoint(kinds):
        least = 1e6 * max(rates)
        memory = lambda share: HostMemory(bytes_per_s=least / share) if share else None
        put = lambda table, part: replace(table, host_memory=memory(part()))
        yield MissingRange(MEMORY, f"{MEMORY}, taken as {least / 1e9:.1f} GB/s or more", put)
