"""The iteration time with a schedule or with stock Megatron's rule, next to the bound that no schedule can beat."""

from megatron_ext.bounds.feasibility import check_fits
from megatron_ext.bounds.lower_bound import lower_bound
from megatron_ext.bounds.memory_headroom import with_headroom, with_most_headroom
from megatron_ext.cost.activations import with_activations
from megatron_ext.cost.cost_table import CostTable
from megatron_ext.planner.stock import stock_schedule
from megatron_ext.schedule.match import match
from megatron_ext.schedule.memory_bill import memory_bill
from megatron_ext.schedule.user_defined_schedule import Schedule
from megatron_ext.simulator.simulation import Result, simulate
from megatron_ext.simulator.timing import Timing
from megatron_ext.workload.workload import Workload


def evaluate(
    workload: Workload,
    table: CostTable,
    schedule: Schedule | None = None,
    *,
    trace: bool = False,
    extrapolate: bool = False,
) -> Result:
    """Simulate one iteration of ``workload`` by ``schedule``, or by stock Megatron's rule.

    Args:
        schedule: must be valid (:func:`megatron_ext.schedule.validate.validate`).
        trace: keep every interval in ``Result.events``.
        extrapolate: read curves outside their measured range.

    Raises:
        InputError: the schedule is not for this workload, no schedule can fit (without ``schedule``), or the table
            lacks a figure.
    """
    workload = with_activations(workload, table)
    any_plan = with_most_headroom(workload)
    if schedule is None:
        workload = with_headroom(workload)
        check_fits(workload)
        schedule = stock_schedule(workload)
    else:
        match(schedule, workload)
    timing = Timing(workload, table, extrapolate=extrapolate)
    result = simulate(workload, timing, schedule, trace=trace, bound_us=lower_bound(any_plan, timing))
    return result._replace(memory=tuple(memory_bill(schedule, workload)))
