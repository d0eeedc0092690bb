"""How long a run's host copies take before its first step: their pages are made, and every rank page-locks them."""

from megatron_ext.cost.cost_table import CostTable
from megatron_ext.schedule.memory_bill import memory_bill
from megatron_ext.schedule.user_defined_schedule import Schedule
from megatron_ext.workload.nodes import pinned_bytes_of_nodes
from megatron_ext.workload.workload import Workload

GIB = 2**30


def set_up_line(schedule: Schedule, workload: Workload, table: CostTable) -> str | None:
    """One line of it, of the node with the most; None where the schedule has no host copies, or the table no figure."""
    bills = memory_bill(schedule, workload)
    copies = [bill.memory.host_bytes.get("host_copies", 0) for bill in bills]
    most = max(pinned_bytes_of_nodes(workload.parallel, {}, copies))
    pages, pin = table.set_up.pages_us_per_gib, table.set_up.pin_us_per_gib
    if not most or pages is None:
        return None
    parts = [f"{pages * most / GIB / 1e6:.3g} s to make their pages"]
    if pin is not None:
        parts.append(f"{pin * most / GIB / 1e6:.3g} s to page-lock them on every rank")
    return f"before the first step: {most / GIB:.3g} GiB of host copies a node, about {', '.join(parts)}"
