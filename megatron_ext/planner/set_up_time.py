"""How long a run sets up its host copies before the first step: pages are made, and every rank page-locks them."""

from megatron_ext.cost.cost_table import CostTable
from megatron_ext.formats.errors import GIB
from megatron_ext.schedule.memory_bill import copies_of_whole, host_bytes, on_nodes
from megatron_ext.schedule.user_defined_schedule import Schedule
from megatron_ext.workload.workload import Workload


def set_up_line(schedule: Schedule, workload: Workload, table: CostTable) -> str | None:
    """One line with the setup time of the node with the most host copies. None if the schedule has no host copies or
    the table lacks a figure."""
    copies = [kinds.get("host_copies", 0) for kinds in host_bytes(schedule, workload)]
    most = max(on_nodes(workload, copies))
    pages, locking = table.set_up.pages_us_per_gib, table.set_up.pin_us_per_gib
    if not most or pages is None:
        return None
    parts = [f"{pages * most / GIB / 1e6:.3g} s to make their pages"]
    if locking is not None:
        parts.append(f"{locking * most / GIB / 1e6:.3g} s to page-lock them on every rank")
    return f"before the first step: {most / GIB:.3g} GiB of host copies per node, about {', '.join(parts)}"


def never_whole_line(schedule: Schedule, workload: Workload) -> str | None:
    """What it takes to train parameters that never fit whole onto a device; None if they fit."""
    copies = copies_of_whole(schedule)
    if not any(copies):
        return None
    held = [sum(kinds.values()) + copied for kinds, copied in zip(host_bytes(schedule, workload), copies)]
    at_most, taken = (max(on_nodes(workload, of_ranks)) for of_ranks in (held, copies))
    limit = workload.limits.host_bytes
    short = "" if limit is None or at_most <= limit else f", {at_most - limit} bytes more than limits.host_bytes"
    return (
        "all parameters together do not fit onto the device, next to what else it holds, so they are built, loaded, "
        "evaluated and saved group by group; while they are built, loaded or saved, a node also holds copies of "
        f"{taken} bytes in host memory{short}"
    )
