"""Simulates one iteration: one function from workload, cost table and schedule to a result."""

from typing import NamedTuple

import msgspec

from megatron_ext.cost.cost_table import KINDS
from megatron_ext.formats import rank_memory
from megatron_ext.formats.trace import Event
from megatron_ext.schedule.byte_bill import publish_passes
from megatron_ext.schedule.footprint import device_peaks, pinned_host_bytes, slot_bytes
from megatron_ext.schedule.memory_bill import Bill, states_on_drive_bytes
from megatron_ext.schedule.user_defined_schedule import Predicted, Schedule
from megatron_ext.simulator.activity_kinds import COMPUTE
from megatron_ext.simulator.engine import Engine
from megatron_ext.simulator.rank_programs import rank_programs
from megatron_ext.simulator.step_places import delayed_steps, early_steps, optimizer_us
from megatron_ext.simulator.thread_path import LAUNCHES, least_thread_us, thread_us
from megatron_ext.simulator.timing import Timing
from megatron_ext.workload.workload import Workload


class Result(NamedTuple):
    """One simulated iteration. Times are microseconds, from the end of one optimizer step to
    the end of the next.

    ``exposed_us``: by pipeline rank, the time for which compute steps wait for groups; ``group_exposed_us``: the same
    by group. ``busy_us``: by link, the largest over ranks; for ``host_memory`` the time in which it was full, for
    ``launches`` the time of the training thread. ``gather_us``: the largest over ranks of the summed time of all its
    gathers. ``peak_bytes``: ``device`` by pipeline rank, ``pinned_host`` by node, ``staging`` by pipeline rank.
    ``memory``: the memory bill by pipeline rank, if it was asked for. ``left_out`` names the figures that the cost
    table lacks. ``hidden_step_us``: by pipeline rank, the time by which steps during the backward or the next iteration
    shorten the host's optimizer step at the end. ``early_bytes``: by pipeline rank, the bytes of the copies of states
    for steps during the backward. Both are empty if there are no such steps.
    """

    iteration_time_us: float
    bubble_rate: float
    exposed_us: tuple[float, ...]
    lower_bound_us: float
    peak_bytes: dict[str, tuple[int, ...]]
    busy_us: dict[str, float]
    gather_us: float
    group_exposed_us: dict[int, float]
    left_out: tuple[str, ...]
    events: list[Event] | None = None
    memory: tuple[Bill, ...] = ()
    hidden_step_us: tuple[float, ...] = ()
    early_bytes: tuple[int, ...] = ()

    def as_json(self) -> dict:
        """The figures as ``simulate --json`` prints them."""
        fields = self._asdict()
        del fields["events"]
        fields["memory"] = [
            {**msgspec.to_builtins(bill.memory), "step_device_bytes": bill.step_device_bytes} for bill in self.memory
        ]
        fields["group_exposed_us"] = {str(group): us for group, us in sorted(self.group_exposed_us.items())}
        return fields

    def as_text(self) -> str:
        """The figures as text for people, in milliseconds."""
        lines = [
            f"iteration    {self.iteration_time_us / 1e3:.3f} ms (at least {self.lower_bound_us / 1e3:.3f} ms by any "
            "schedule)",
            f"bubble rate  {100 * self.bubble_rate:.2f} % (of the slowest rank's time from its first step to its "
            "last, the part in which its layers do not compute)",
            "exposed      " + ", ".join(f"rank {rank}: {us / 1e3:.3f} ms" for rank, us in enumerate(self.exposed_us)),
            "busy         " + ", ".join(f"{link}: {us / 1e3:.3f} ms" for link, us in self.busy_us.items()),
            f"whole parameters on a device at most {max(self.peak_bytes['device'], default=0)} bytes",
        ]
        if self.hidden_step_us:
            hidden = ", ".join(f"rank {rank}: {us / 1e3:.3f} ms" for rank, us in enumerate(self.hidden_step_us))
            lines.append(f"host's step  hidden {hidden}")
        lines += [f"memory rank {rank}: {rank_memory.text(bill.memory)}" for rank, bill in enumerate(self.memory)]
        return "\n".join(lines)


def simulate(
    workload: Workload,
    timing: Timing,
    schedule: Schedule,
    *,
    trace: bool = False,
    bound_us: float = 0.0,
    peaks: bool = True,
) -> Result:
    """Simulate one iteration of ``workload`` by ``schedule``, which must be valid and match the workload.

    Args:
        trace: keep every interval in ``Result.events``.
        bound_us: a time that no schedule can beat, stored next to the figures; see :mod:`megatron_ext.bounds`.
        peaks: compute ``Result.peak_bytes``. A search that needs only times is faster without it.
    """
    programs = rank_programs(schedule, workload, timing)
    publish: list[list[tuple[int, int, float]]] = [[] for _ in programs]
    for entry in schedule.publish:
        group = schedule.groups[entry.group]
        own, as_dense = timing.among(group.ranks), workload.parallel.as_dense(group.bytes, group.ranks)
        us = own.publish_us(group.pp_rank, entry.to, group.bytes)
        publish[group.pp_rank].append((entry.group, as_dense, us))
    states_us = _states_us(schedule, workload, timing)
    early, delayed = early_steps(schedule, workload, timing), delayed_steps(workload, timing, states_us)
    how = {"states_us": [] if delayed else states_us, "early": early, "delayed": delayed}
    how["optimizer_us"] = optimizer_us(schedule, workload, timing)
    engine = Engine(programs, workload, timing, publish, trace=trace, **how)
    if engine.host_memory is not None:
        passes = {entry.group: publish_passes(schedule.groups[entry.group], workload) for entry in schedule.publish}
        engine.host_memory.publish_passes = passes
    launches = thread_us(schedule, workload, timing, programs)
    iteration_time, bound_us = max(engine.run(), launches), max(bound_us, least_thread_us(workload, timing))
    spans = [rank.last_end - rank.first_start for rank in engine.ranks]
    longest = max(range(len(spans)), key=lambda index: (spans[index], -index))
    busy = {KINDS[kind]: max(rank.busy[kind] for rank in engine.ranks) for kind in range(len(KINDS))}
    busy["optimizer"] = max(rank.optimizer_us for rank in engine.ranks)
    busy["host_memory"] = max(rank.memory_full_us for rank in engine.ranks)
    busy[LAUNCHES] = launches
    gathers = [sum(g.end_us - g.start_us for g in rank.program.gathers) for rank in engine.ranks]
    return Result(
        iteration_time_us=iteration_time,
        bubble_rate=1.0 - engine.ranks[longest].compute_us / spans[longest],
        exposed_us=tuple(rank.exposed for rank in engine.ranks),
        # Only rounding may put the bound above the time. A larger difference means a wrong bound, which must show.
        lower_bound_us=min(bound_us, iteration_time) if bound_us <= iteration_time * (1 + 1e-9) else bound_us,
        peak_bytes=_peak_bytes(schedule) if peaks else {},
        busy_us={link: us for link, us in busy.items() if us or link == KINDS[COMPUTE]},
        gather_us=float(max(gathers, default=0.0)),
        group_exposed_us=engine.group_exposed,
        left_out=timing.left_out,
        events=engine.events,
        hidden_step_us=tuple(rank.early_us for rank in engine.ranks) if early is not None or delayed else (),
        early_bytes=tuple(rank.early_bytes for rank in engine.ranks) if early is not None else (),
    )


def _peak_bytes(schedule: Schedule) -> dict[str, tuple[int, ...]]:
    slots = schedule.limits.nvme_slots
    return {
        "device": tuple(device_peaks(schedule)),
        "pinned_host": tuple(pinned_host_bytes(schedule)),
        "staging": tuple(slot_bytes(schedule, rank) * slots for rank in range(schedule.parallel.pp)),
    }


def _states_us(schedule: Schedule, workload: Workload, timing: Timing) -> list[float]:
    """By pipeline rank, the time in which optimizer states pass to the drive and back; empty if no states rest
    there."""
    if schedule.state_slots is None:
        return []
    return [
        timing.states_us(states_on_drive_bytes(own, workload), schedule.state_slots.slot_bytes)
        for own in ([g for g in schedule.groups if g.pp_rank == rank] for rank in range(workload.parallel.pp))
    ]


def with_prediction(schedule: Schedule, result: Result, baselines_us: dict[str, float] | None = None) -> Schedule:
    """The schedule with its prediction stored in it."""
    figures = {name: getattr(result, name) for name in Predicted.__struct_fields__ if name in Result._fields}
    figures |= {"memory": tuple(bill.memory for bill in result.memory), "baselines_us": baselines_us or {}}
    return msgspec.structs.replace(schedule, predicted=Predicted(**figures))
