"""Cost tables with one choice alone: an algorithm of all-gathers, a way of the host's step."""

from typing import get_args

from msgspec.structs import replace

from megatron_ext.cost.cost_table import CAST_ON_DEVICE, JOINED, CostTable, with_parts
from megatron_ext.workload.route import Algorithm


def by_algorithm(table: CostTable) -> tuple[CostTable, dict[str, CostTable]]:
    """The table without the all-gathers that a schedule can ask for, and by algorithm one with these alone."""
    gpu = table.routes.gpu
    if gpu is None:
        return table, {}

    def with_gathers(curve) -> CostTable:
        return with_parts(table, {"routes.gpu": curve})

    others = {
        name: with_gathers(replace(gpu, points=points, algorithms={}))
        for name, points in gpu.algorithms.items()
        if name in get_args(Algorithm) and points
    }
    rest = {name: points for name, points in gpu.algorithms.items() if name not in others}
    return (with_gathers(replace(gpu, algorithms=rest)) if others else table), others


def host_steps(table: CostTable) -> list[CostTable]:
    """The table with the host's step as Megatron makes it, as the run does, and with parameters cast on the device;
    where that was not measured, as Megatron does."""
    step = table.host_step
    if step is None:
        return [table] * 3
    ways = (step.points, *(step.algorithms.get(way) or step.points for way in (JOINED, CAST_ON_DEVICE)))
    return [replace(table, host_step=replace(step, points=points, algorithms={})) for points in ways]
