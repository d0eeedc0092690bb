"""Sentences about what a plan does with the host's optimizer, and about what a delayed update would bring. A delayed
update is only mentioned and never chosen, because it changes training."""

from operator import sub
from typing import NamedTuple

from msgspec.structs import replace

from megatron_ext.cost.activations import with_activations
from megatron_ext.cost.cost_table import CostTable
from megatron_ext.schedule.memory_bill import host_bytes
from megatron_ext.schedule.user_defined_schedule import Schedule
from megatron_ext.simulator.simulation import simulate
from megatron_ext.simulator.timing import Timing
from megatron_ext.workload.workload import Workload


def step_note(schedule: Schedule) -> str | None:
    """What the host's steps during the backward do, for the reader; None if there are no such steps."""
    if schedule.rollback_bytes is None or schedule.predicted is None:
        return None
    ms = schedule.predicted.busy_us.get("host_step", 0.0) / 1e3
    return (
        f"The host's optimizer steps during the backward, for {ms:.1f} ms on the busiest rank, with "
        f"{schedule.rollback_bytes} bytes of host memory per rank for the states from before. "
        "If gradients are clipped (--clip-grad), these steps are repeated at the end, and the iteration takes longer."
    )


class Delay(NamedTuple):
    """The simulated iteration times with every update at once and with every update delayed, and the additional host
    memory that a delay needs, for the rank that needs most."""

    at_once_us: float
    delayed_us: float
    host_bytes: int

    def text(self) -> str:
        """One sentence for the reader: whether the delay saves time. No simulation can say what it costs in loss."""
        gain = 1.0 - self.delayed_us / self.at_once_us
        change = f"{abs(gain):.1%} {'less' if gain > 0 else 'more'}"
        return (
            f"With --delayed-parameter-update an iteration is simulated to take {self.delayed_us / 1e3:.1f} ms instead "
            f"of {self.at_once_us / 1e3:.1f} ({change}), with {abs(self.host_bytes)} bytes "
            f"{'more' if self.host_bytes >= 0 else 'less'} of host memory per rank: "
            f"{'it pays in time' if gain > 0 else 'it does not pay'}. It changes training, and loss was higher when "
            "it was tried, so it is never chosen here."
        )


def delay(schedule: Schedule, workload: Workload, table: CostTable, *, extrapolate: bool = False) -> Delay | None:
    """What delayed updates would bring with the same schedule, if states that rest on the device rested in host memory
    instead. None if the table has no figures for the host's step."""
    settings = workload.optimizer
    if not settings.on_host:
        return None
    workload = with_activations(workload, table)
    works = [replace(workload, optimizer=replace(settings, delayed=d)) for d in (False, True)]
    timing = Timing(workload, table, extrapolate=extrapolate)
    if not timing.offers_host_step:
        return None
    groups = (replace(group, states_rest=None) if group.states_rest == "device" else group for group in schedule.groups)
    plain = replace(schedule, groups=tuple(groups), rollback_bytes=None, step_slots=None)
    both = [(schedule, works[0]), (plain, works[1])]
    held = [[sum(kinds.values()) for kinds in host_bytes(by, work)] for by, work in both]
    at_once, delayed = (simulate(work, timing, by).iteration_time_us for by, work in both)
    return Delay(at_once, delayed, max(map(sub, held[1], held[0])))
