"""The time and memory that a workload takes without any plan, with stock Megatron."""

from msgspec.structs import replace

from megatron_ext.cost.activations import with_activations
from megatron_ext.cost.cost_table import CostTable
from megatron_ext.formats.errors import InputError
from megatron_ext.planner.last_lines import ComparedRun, short_of
from megatron_ext.planner.stock import OVERLAPPED, STOCK_RULES
from megatron_ext.schedule.memory_bill import host_bytes_of_nodes, memory_bill
from megatron_ext.simulator.simulation import simulate
from megatron_ext.simulator.timing import Timing
from megatron_ext.workload.workload import Limits, Workload


def without_plan(
    workload: Workload, table: CostTable, *, known_us: dict[str, float] | None = None, extrapolate: bool = False
) -> ComparedRun | None:
    """Stock Megatron with the same options at zero stage 1, with or without ``--overlap-param-gather``, whichever is
    faster; and whether the workload's limits allow it. None if the table lacks a figure for it.

    Args:
        known_us: iteration times by option, if the workload has zero stage 1.
    """
    limits = workload.limits
    whole = replace(with_activations(workload, table), zero_stage=1, limits=Limits())
    if not known_us or workload.zero_stage > 1:
        timing = Timing(whole, table, extrapolate=extrapolate)
        try:
            known_us = {name: simulate(whole, timing, by(whole)).iteration_time_us for name, by in STOCK_RULES.items()}
        except InputError:
            return None
    name, (held, on_node) = min(known_us, key=known_us.__getitem__), stock_bytes(whole)
    refused = short_of(held, limits.device_bytes) or short_of(on_node, limits.host_bytes, "a node's host")
    return ComparedRun(name + (" at zero stage 1" if workload.zero_stage > 1 else ""), known_us[name], on_node, refused)


def stock_bytes(workload: Workload) -> tuple[int, int]:
    """The bytes that stock Megatron holds by its memory bill, without regard to limits: on the device of the rank that
    holds most, and in the host memory of the node that holds most."""
    schedule = STOCK_RULES[OVERLAPPED](workload)
    bills = memory_bill(schedule, workload)
    return max(bill.memory.device_total_bytes for bill in bills), max(host_bytes_of_nodes(schedule, workload))
