"""How fast processors computed at some time, relative to when a cost table was measured.

A shared machine changes its speed by tens of percent, for seconds and for minutes. ``host_cpu.compute_rounds`` of a
cost table says when its compute was measured on all ranks at once, and how long a micro-batch took.
"""

from collections.abc import Mapping
from statistics import median

from msgspec.structs import replace

from megatron_ext.cost.cost_table import CostTable


def relative_speed(table: CostTable, beside: CostTable, rounds: Mapping[int, tuple[float, float]]) -> dict[int, float]:
    """By round of an interleaved run, how many times as long as in ``table`` the same compute took in ``beside``.

    Args:
        beside: a table whose compute was measured in these rounds.
        rounds: begin and end of each, in seconds of Unix time; a round in which no compute ended is left out.
    """
    usual, found = median(us for _, us in table.host_cpu.compute_rounds), {}
    for number, (begin, end) in rounds.items():
        within = [us for at, us in beside.host_cpu.compute_rounds if begin <= at <= end]
        if within:
            found[number] = median(within) / usual
    return found


def at_speed(table: CostTable, factor: float) -> CostTable:
    """``table`` with everything that processors do taking ``factor`` times as long: compute, the optimizer, and the
    processor time of transports. Links stay as they are."""

    def slower(rows, *names: str) -> tuple:
        return tuple(
            replace(row, **{name: getattr(row, name) * factor for name in names if getattr(row, name) is not None})
            for row in rows
        )

    optimizer, section = table.optimizer, table.host_cpu
    if optimizer is not None:
        optimizer = replace(optimizer, points=slower(optimizer.points, "p50_us"))
    if section is not None:
        section = replace(
            section, processor_us={name: slower(points, "us") for name, points in section.processor_us.items()}
        )
    compute = slower(table.compute, "forward_us", "backward_us")
    return replace(table, compute=compute, optimizer=optimizer, host_cpu=section)
