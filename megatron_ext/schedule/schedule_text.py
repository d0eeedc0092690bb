"""A schedule as a text grid: one row per step, one column per pipeline rank.

A cell is the step and its actions: ``s2:0`` stage in group 2 into slot 0; ``+3g`` unshard
group 3 by ``gpu`` (``h`` in two legs, ``e`` by copy engines,
``c`` cpu, ``s`` cpu_shard, ``n`` nvme), ``+3c>7`` to be whole by step index 7, ``+3g@1``
just before layer 1; ``-3`` reshard group 3, ``-3@1`` just after layer 1.
"""

from collections import Counter

from megatron_ext.formats import rank_memory
from megatron_ext.schedule.user_defined_schedule import Rank, Schedule
from megatron_ext.schedule.validate import InvalidSchedule
from megatron_ext.workload.route import HIERARCHICAL, SYMMETRIC, kind_of

ROWS = 200
"""The most rows that are shown, unless all rows are asked for."""

ARROW = "--> "
_LETTERS = {HIERARCHICAL: "h", SYMMETRIC: "e"}
"""Letters for the algorithms of route ``gpu``."""


def action_text(entry, index: int, groups) -> str:
    """The actions of one step (or of the start, index -1) in issue order. ``groups`` of the schedule give the algorithm
    of each gather."""
    parts = [f"s{a.group}:{a.slot}" for a in entry.stage_in]
    for a in entry.unshard:
        need = f">{a.need_by}" if a.need_by >= 0 and a.need_by != index else ""
        at = f"@{a.at}" if a.at >= 0 else ""
        way = _way(a, groups)
        letter = _LETTERS.get(way) or kind_of(way).letter
        parts.append(f"+{a.group}{letter}{need}{at}")
    for a in getattr(entry, "reshard", ()):
        parts.append(f"-{a.group}" + (f"@{a.at}" if a.at >= 0 else ""))
    return " ".join(parts)


def _way(action, groups) -> str:
    """The route of an unshard, or its algorithm. In a schedule that fails, the action's group may be missing."""
    known = 0 <= action.group < len(groups)
    return (groups[action.group].algorithm_by(action.route) if known else None) or action.route


def bytes_by_route(schedule: Schedule) -> str:
    """The bytes that one iteration brings by each route, summed over the pipeline ranks. If experts are sharded among
    other ranks than dense parameters, their part is shown too."""
    found, of_experts = Counter(), Counter()
    for action in schedule.unshards:
        group = schedule.groups[action.group]
        found[action.route] += group.bytes
        if group.ranks != schedule.parallel.dp:
            of_experts[action.route] += group.bytes
    text = _by_route(found) or "none"
    if of_experts:
        ranks = schedule.parallel.expert_dp
        held = f"sharded among {ranks} ranks" if ranks > 1 else "each held by one rank"
        text += f"; of these, experts ({held}): {_by_route(of_experts)}"
    return text


def _by_route(sums: dict[str, int]) -> str:
    return ", ".join(f"{route} {size / 2**20:.1f} MiB" for route, size in sorted(sums.items(), reverse=True))


def grid(schedule: Schedule, error: InvalidSchedule | None = None, *, every_row: bool = False) -> str:
    """The grid; with ``error``, an arrow marks the step at which the schedule fails.

    For a long schedule the first :data:`ROWS` rows are shown, or the rows around the failing step.
    """
    columns = [_column(rank, schedule.groups) for rank in schedule.ranks]
    number = max((len(column) for column in columns), default=0)
    failing = None
    if error is not None and error.pp_rank is not None:
        failing = (0 if error.step_index is None else error.step_index + 1, error.pp_rank)
    first, last = 0, number
    if not every_row and number > ROWS:
        first = 0 if failing is None else min(max(failing[0] - ROWS // 2, 0), number - ROWS)
        last = first + ROWS
    shown = range(first, last)
    header = [f"rank {rank.pp_rank}" for rank in schedule.ranks]
    cells = [[column[row] if row < len(column) else "" for row in shown] for column in columns]
    widths = [max([len(ARROW) + len(text) for text in (name, *texts)]) for name, texts in zip(header, cells)]
    label = max(len(str(number)), len("start"))
    lines = [" " * label + "  " + "  ".join((" " * len(ARROW) + n).ljust(w) for n, w in zip(header, widths)).rstrip()]
    if first:
        lines.append(f"... {first} rows before")
    for position, row in enumerate(shown):
        name = "start" if row == 0 else str(row - 1)
        texts = []
        for rank, width in enumerate(widths):
            mark = ARROW if failing == (row, rank) else " " * len(ARROW)
            texts.append((mark + cells[rank][position]).ljust(width))
        lines.append((name.rjust(label) + "  " + "  ".join(texts)).rstrip())
    if last < number:
        lines.append(f"... {number - last} rows after")
    if error is not None:
        lines.append(f"{ARROW}{error}")
    return "\n".join(lines)


def _column(rank: Rank, groups) -> list[str]:
    steps = (f"{entry.step} {action_text(entry, index, groups)}" for index, entry in enumerate(rank.steps))
    return [action_text(rank.start, -1, groups), *map(str.rstrip, steps)]


def summary(schedule: Schedule) -> str:
    """Sizes and routes in a few lines."""
    counts = Counter(_way(action, schedule.groups) for action in schedule.unshards)
    routes = ", ".join(f"{number} by {route}" for route, number in sorted(counts.items())) or "none"
    parallel = schedule.parallel
    lines = [
        f"{parallel.order}, {parallel.pp} pipeline ranks, {parallel.vp} chunks, {parallel.num_microbatches} "
        "micro-batches, "
        f"zero stage {schedule.zero_stage}, planned by {schedule.metadata.planner or 'hand'}",
        f"{len(schedule.groups)} groups of {sum(g.bytes for g in schedule.groups)} bytes, gathers: {routes}",
    ]
    resting = sum(group.shard_rests == "host" for group in schedule.groups)
    if resting:
        lines.append(f"{resting} groups' shards rest in host memory")
    for rest, where in (("nvme", "on the drive"), ("device", "on the device, where they are stepped")):
        number = sum(group.states_rest == rest for group in schedule.groups)
        lines += [f"{number} groups' optimizer states rest {where}"] if number else []
    for kept in ("sharded", "host"):
        every = [str(group.reduce_every) for group in schedule.groups if group.gradients == kept]
        if every:
            visits = "/".join(sorted(set(every), key=int))
            alone = sum(group.gradients == kept and group.alone for group in schedule.groups)
            lines.append(f"gradients {kept}: {len(every)} groups, reduced every {visits} backward steps of their chunk")
            lines[-1] += f", {alone} allocated alone" if alone else ""
    if schedule.publish:
        lines.append(f"{len(schedule.publish)} groups are published after the optimizer step")
    if schedule.predicted is not None:
        bills = enumerate(schedule.predicted.memory)
        lines += [f"memory rank {rank}: {rank_memory.text(memory)}" for rank, memory in bills]
    return "\n".join(lines)
