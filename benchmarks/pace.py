"""How fast processors computed at some time, beside when a cost table was measured.

A machine that is shared changes its pace by tens of percent, for seconds and for minutes. A cost table says when its
compute was measured and what a walk through all layers took then (``metadata.source.pace``), on all ranks at once.
"""

from collections.abc import Mapping
from statistics import median

from msgspec.structs import replace

from megatron_ext.cost.model import CostTable, Curve


def pace_of(table: CostTable) -> list[tuple[float, float]]:
    """(Unix time in seconds, microseconds of a walk), in the order of time."""
    return [(at, us) for at, us in table.metadata.source["pace"]]


def relative_pace(table: CostTable, beside: CostTable, turns: Mapping[int, tuple[float, float]]) -> dict[int, float]:
    """By turn, how many times as long as when ``table`` was measured the same compute took, by ``beside``, which was measured in these
    turns; turns in which no walk ended are left out.

    Args:
        turns: when each began and ended, Unix time in seconds.
    """
    usual, found = median(us for _, us in pace_of(table)), {}
    for turn, (begin, end) in turns.items():
        within = [us for at, us in pace_of(beside) if begin <= at <= end]
        if within:
            found[turn] = median(within) / usual
    return found


def at_pace(table: CostTable, factor: float) -> CostTable:
    """``table`` with all that processors do taking ``factor`` times as long: compute, the optimizer, and what
    transports take of processors. Links are as they are."""

    def slower(rows, *names: str) -> tuple:
        return tuple(replace(row, **{name: getattr(row, name) * factor for name in names if getattr(row, name) is not None}) for row in rows)

    def curve(given: Curve, *names: str) -> Curve:
        return replace(given, points=slower(given.points, *names), algorithms={name: slower(rows, *names) for name, rows in given.algorithms.items()})

    def transports(holder):
        curves = {name: value for name in holder.__struct_fields__ if isinstance(value := getattr(holder, name), Curve)}
        return replace(holder, **{name: curve(value, "processor_us") for name, value in curves.items()})

    optimizer = None if table.optimizer is None else curve(table.optimizer, "p50_us")
    compute = slower(table.compute, "forward_us", "backward_us")
    return replace(transports(table), compute=compute, optimizer=optimizer, routes=transports(table.routes), publish=transports(table.publish))
