"""How fast processors computed at some time, beside when a cost table was measured.

A machine that is shared changes its pace by tens of percent, for seconds and for minutes. A cost table says when its
compute was measured and what a walk through all layers took then (``metadata.source.pace``), on all ranks at once.
"""

from collections.abc import Mapping
from statistics import median

import msgspec

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

    def points(curve: Curve | None, *names: str) -> Curve | None:
        if curve is None:
            return None
        slower = lambda rows: tuple(msgspec.structs.replace(row, **{name: getattr(row, name) * factor for name in names if getattr(row, name) is not None}) for row in rows)  # noqa: E731
        return msgspec.structs.replace(curve, points=slower(curve.points), algorithms={name: slower(rows) for name, rows in curve.algorithms.items()})

    used = lambda holder, *names: msgspec.structs.replace(holder, **{name: points(getattr(holder, name), "processor_us") for name in names})  # noqa: E731
    compute = [msgspec.structs.replace(row, forward_us=row.forward_us * factor, backward_us=row.backward_us * factor) for row in table.compute]
    return msgspec.structs.replace(
        table, compute=tuple(compute), optimizer=points(table.optimizer, "p50_us"), reduce=points(table.reduce, "processor_us"),
        routes=used(table.routes, "gpu", "cpu", "nvme"), publish=used(table.publish, "cpu", "nvme", "internode"),
    )  # fmt: skip
