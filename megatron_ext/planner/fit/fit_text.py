"""What ``fit`` found, on one screen and as one JSON object."""

import os
import shlex
from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

import msgspec

from megatron_ext.formats import rank_memory
from megatron_ext.planner.fit.certainty import Certainty
from megatron_ext.planner.fit.estimate_setting import Choice, Stock, stock_of
from megatron_ext.planner.fit.request import Problem, Request, with_changes
from megatron_ext.planner.fit.search_settings import Fit
from megatron_ext.planner.fit.setting import OTHER_NAMES, Setting, as_words, changes
from megatron_ext.planner.quick_plan import FewRounds
from megatron_ext.planner.verdict import option_hint
from megatron_ext.planner.what_limits import WORDS, limit_of
from megatron_ext.workload.workload import Limits

GIB = 1 << 30
OURS = ("--zero-stage", "--data-parallel-size")
"""Of a setting's options, those that a launch script does not have."""
NEEDED = ("--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather")
MOST_EQUAL, MOST_WAYS = 4, 8
QUICK = "planned by quick rules, which --out writes; the commands below plan in full, which may take minutes"
ALL_ON_HOST = "gradients in host memory, shards in host memory, optimizer on the host"


class Found(NamedTuple):
    """An answer with what was asked and how certain it is; ``stock``: stock Megatron, whether it fits or not."""

    request: Request
    problem: Problem
    fit: Fit
    certainty: Certainty
    stock: list[tuple[Setting, Stock]]

    @property
    def limits(self) -> Limits:
        """Of a plan of the winner."""
        winner = self.fit.winner
        room = self.problem.room(winner.setting, winner.rounds.parts[0][0])
        return msgspec.structs.replace(self.problem.limits, device_bytes=room)

    @property
    def given(self) -> tuple[Choice | None, str]:
        """The settings as given, or None and why they cannot be."""
        refused = self.problem.refused
        return (None, refused) if refused else (self.fit.given, self.fit.refused)

    @property
    def launch(self) -> tuple[dict[str, str], list[str]]:
        """Options to add to the launch script, and those to take out."""
        given, chosen = self.problem.space.given.options(), self.fit.winner.setting.options()
        for name in (*OURS, *self.problem.changed):
            given.pop(name, None)
        add, take_out = changes(given, {name: value for name, value in chosen.items() if name not in OURS})
        there = {word.partition("=")[0] for word in self.request.words}
        take_out += [other for name, other in OTHER_NAMES.items() if name in (*add, *take_out)]
        return add | {name: "" for name in NEEDED if name not in there}, [name for name in take_out if name in there]

    def words(self, *without: str) -> tuple[str, ...]:
        """The script's arguments with the winner's options, and without ours."""
        add, take_out = self.launch
        return with_changes(self.request.words, add, [*take_out, *without])

    def text(self, choice: Choice) -> str:
        """The setting of a choice, with parallel sizes where these are searched."""
        return choice.setting.text(self.request.search_layout)

    def ours(self) -> dict[str, str]:
        """Options of ``describe`` and ``prepare`` for the winner."""
        setting, limits = self.fit.winner.setting, self.limits
        known = {"--limit-device-bytes": limits.device_bytes, "--limit-host-bytes": limits.host_bytes}
        known["--gpus-per-node"] = setting.parallel.gpus_per_node
        ours = {name: setting.options()[name] for name in OURS}
        return ours | {name: str(value) for name, value in known.items() if value is not None}

    def commands(self) -> list[str]:
        """Shell commands that plan the winner."""
        setting, batch, ours = self.fit.winner.setting, self.fit.winner.setting.batch, self.ours()
        words = self.words(*ours)
        recompute = {name: v for name, v in setting.options().items() if name.startswith("--recompute")}
        sizes = {"--seq-length": str(batch.seq_length), "--micro-batch-size": str(batch.micro_batch_size)}
        sizes |= {"--sequence-parallel": ""} if batch.sequence_parallel else {}
        sizes |= {"--context-parallel-size": str(batch.context_parallel)} if batch.context_parallel > 1 else {}
        sizes |= {"--cross-entropy-fusion-impl": batch.loss_fusion} if batch.loss_fusion else {}
        estimate = (
            f"megatron-ext cost estimate --hardware {self.request.hardware} --workload workload.json --out "
            f"cost_table.json {as_words(sizes | recompute)}"
        )
        tables = dict(zip(self.problem.costs.tables, self.request.cost_tables))
        table = "cost_table.json" if self.request.hardware else tables[batch.micro_batch_size]
        return [
            f"megatron-ext describe --out workload.json {as_words(ours)} -- {shlex.join(words)}",
            *([estimate] if self.request.hardware else []),
            f"megatron-ext plan --cost-table {table} --workload workload.json --out schedule.json",
        ]


def judge(request: Request, problem: Problem, fit: Fit) -> Found:
    """Draw costs for everything that is shown."""
    shown = [*fit.frontier, *fit.tried[:MOST_EQUAL], *([fit.given] if fit.given is not None else [])]
    return Found(request, problem, fit, Certainty(problem.costs, shown), list(_stock(problem)))


def _stock(problem: Problem) -> Iterator[tuple[Setting, Stock]]:
    """Of the given layout and batch at zero stage 1: with and without recompute, the optimizer here and there."""
    given, batch = problem.space.given, problem.space.given.batch
    places = [False, True] if given.shape.dtype != "float32" else [False]
    for recompute, on_host in product((None, "full"), places):
        optimizer = msgspec.structs.replace(given.optimizer, on_host=on_host, delayed=False)
        recomputed = batch._replace(recompute=recompute, recompute_method="uniform", recompute_num_layers=1)
        setting = given._replace(zero_stage=1, batch=recomputed, optimizer=optimizer)
        if problem.costs.allows(setting):
            rounds = FewRounds(setting.workload(problem.limits))
            yield setting, stock_of(rounds, rounds.timings(problem.costs.of(setting, rounds.parts[0][0])))


def equal_to_winner(found: Found) -> list[Choice]:
    """Choices that are as fast as the winner as far as costs are known, the fastest first."""
    fit = found.fit
    others = [one for one in fit.tried if one.setting != fit.winner.setting]
    return [one for one in others[:MOST_EQUAL] if found.certainty.equal(one, fit.winner)]


def way_of(choice: Choice) -> str:
    """What rests where, in words."""
    groups = choice.schedules[-1].groups
    whole = sum(group.bytes for group in groups) or 1

    def share(wanted) -> float:
        return sum(group.bytes for group in groups if wanted(group)) / whole

    host, own = (share(lambda group, place=place: group.gradients == place) for place in ("host", "sharded"))
    words = [choice.setting.batch.recompute and "recompute" or "no recompute"]
    if host + own <= 0.1:
        words.append("whole gradients on the device")
    elif host >= own:
        words.append("gradients in host memory" if host > 0.5 else "a part of the gradients in host memory")
    else:
        words.append("gradient shards on the device")
    if share(lambda group: group.shard_rests == "host") > 0.5:
        words.append("shards in host memory")
    here = not choice.setting.optimizer.on_host or share(lambda group: group.states_rest == "device") > 0.5
    words.append("optimizer on the device" if here else "optimizer on the host")
    return ", ".join(words)


def best_by_way(fit: Fit) -> dict[str, Choice]:
    """The fastest choice for each way, the fastest first."""
    found: dict[str, Choice] = {}
    for choice in fit.tried:
        found.setdefault(way_of(choice), choice)
    return dict(list(found.items())[:MOST_WAYS])


def _figures(found: Found, choice: Choice) -> dict:
    interval = found.certainty.interval(choice)
    busy = choice.times.busy_us
    return {
        "options": choice.setting.options(),
        "iteration_time_us": choice.us,
        "iteration_time_low_us": interval.low,
        "iteration_time_high_us": interval.high,
        "tokens_per_s": choice.tokens_per_s,
        "device_bytes": choice.device_bytes,
        "host_bytes": choice.host_bytes,
        "drive_bytes": choice.drive_bytes,
        "limit": limit_of(busy, choice.us),
        "busy_us": busy,
        "exposed_us": choice.times.exposed_us,
        "lower_bound_us": choice.bound_us,
        "distance_to_bound": choice.us / choice.bound_us - 1,
        "way": way_of(choice),
        "planned": choice.planned,
        "equal_to_winner": found.certainty.equal(choice, found.fit.winner),
        "memory": msgspec.to_builtins(choice.memory),
    }


def as_json(found: Found) -> dict:
    """Every figure; times in microseconds."""
    fit, (add, take_out) = found.fit, found.launch
    return {
        "estimated": found.problem.sheet is not None,
        "hardware": found.problem.sheet and found.problem.sheet.title,
        "settings": {"all": fit.settings, "do_not_fit": fit.pruned, "not_tried": fit.left_out},
        "lower_bound_us": fit.bound_us,
        "frontier": [_figures(found, choice) for choice in fit.frontier],
        "equal": [one.setting.options() for one in equal_to_winner(found)],
        "ways": {name: one.us for name, one in best_by_way(fit).items()},
        "given": _given_json(found),
        "stock": [
            {"options": setting.options(), "device_bytes": stock.device_bytes, "by_option_us": stock.by_option_us}
            for setting, stock in found.stock
        ],
        "launch": {"add": as_words(add), "take_out": take_out},
        "commands": found.commands(),
        "draws": found.certainty.draws,
    }


def _given_json(found: Found) -> dict:
    given, refused = found.given
    if given is None:
        return {"refused": refused}
    figures, gain = _figures(found, given), found.certainty.gain(given)
    if gain is not None and given.stock is not None:
        figures |= {"stock_by_option_us": given.stock.by_option_us, "gain": gain[0]}
        figures |= {"gain_low": gain[1].low, "gain_high": gain[1].high, "answer": gain[2]}
    return figures


def as_text(found: Found, schedule: str | None = None) -> str:
    """One screen. ``schedule``: where ``prepare`` has planned the winner."""
    fit, problem = found.fit, found.problem
    winner, given = fit.winner, problem.space.given
    by = "ESTIMATED from a data sheet, not measured" if problem.costs.table is None else "By a measured cost table"
    planned = sum(choice.planned for choice in fit.tried)
    limits = found.limits
    host = "" if limits.host_bytes is None else f", of a node's host {limits.host_bytes / GIB:.1f} GiB"
    lines = [
        f"{parameters_text(given)}, {given.shape.dtype}; GPUs: {given.parallel.world_size}"
        + (f" of {problem.sheet.title}" if problem.sheet else ""),
        f"a global batch of {given.samples} x {given.batch.seq_length} tokens. {by}.",
        f"{fit.settings} settings: {fit.pruned} do not fit, {planned} planned in full"
        + (f", {fit.left_out} not tried although their bound is lower than the fastest" if fit.left_out else ""),
        f"a run may fill of a device {(limits.device_bytes or 0) / GIB:.1f} GiB by the memory bill{host}",
        "",
        f"{'device GiB':>10} {'ms':>8} {'interval':>18} {'tokens/s':>9} {'host GiB':>8} {'over bound':>10}  "
        f"{'limit':20} settings",
        *(_row(found, choice) for choice in fit.frontier),
        "",
        *_equal_lines(found),
        *_way_lines(found),
        *_given_lines(found),
        f"memory: {rank_memory.text(winner.memory)}",
        *([] if winner.planned else [QUICK]),
        "",
        *_launch_lines(found, schedule),
    ]
    return "\n".join(lines)


def parameters_text(setting: Setting) -> str:
    """How many there are: "1.62B parameters"."""
    numel = setting.shape.numel
    return f"{numel / 1e9:.3g}B parameters" if numel >= 1e9 else f"{numel / 1e6:.3g}M parameters"


def _row(found: Found, choice: Choice) -> str:
    interval = found.certainty.interval(choice)
    mark = "*" if choice is found.fit.winner else "=" if found.certainty.equal(choice, found.fit.winner) else " "
    limit = WORDS[limit_of(choice.times.busy_us, choice.us)]
    drive = f", {choice.drive_bytes / GIB:.0f} GiB on the drive" if choice.drive_bytes else ""
    times = f"{interval.low / 1e3:.0f} to {interval.high / 1e3:.0f}"
    return (
        f"{mark}{choice.device_bytes / GIB:>9.1f} {choice.us / 1e3:>8.0f} {times:>18} {choice.tokens_per_s:>9,.0f} "
        f"{choice.host_bytes / GIB:>8.1f} {choice.us / choice.bound_us - 1:>10.1%}  {limit:20} "
        f"{found.text(choice)}{drive}"
    )


def _equal_lines(found: Found) -> list[str]:
    equal = equal_to_winner(found)
    if not equal:
        return []
    return [
        f"equal to the fastest (*) as far as costs are known ({found.certainty.draws} draws):",
        *(f"  {one.us / 1e3:.0f} ms, {one.device_bytes / GIB:.1f} GiB: {found.text(one)}" for one in equal),
    ]


def _way_lines(found: Found) -> list[str]:
    ways = best_by_way(found.fit)
    if len(ways) < 2:
        return []
    lines = ["by what rests where, within these bytes:"]
    lines += [f"  {one.us / 1e3:.0f} ms: {way} ({found.text(one)})" for way, one in ways.items()]
    winner = found.fit.winner
    on_host = next((one for way, one in ways.items() if way.endswith(f", {ALL_ON_HOST}")), winner)
    if way_of(on_host) != way_of(winner):
        ratio = found.certainty.ratio(on_host, winner)
        sure = "beats" if ratio.low > 1 else "is not told from"
        lines.append(
            f"{way_of(winner)} {sure} everything on the host: {winner.us / 1e3:.0f} ms, {on_host.us / 1e3:.0f} "
            f"({ratio.low:.2f} to {ratio.high:.2f} times as long)"
        )
    return lines


def _given_lines(found: Found) -> list[str]:
    given, refused = found.given
    if given is None:
        return [f"as given it {'is refused' if found.problem.refused else 'does not fit'}: {refused}"]
    gain = found.certainty.gain(given)
    lines = [f"as given: {given.us / 1e3:.0f} ms, {given.device_bytes / GIB:.1f} GiB"]
    if gain is None or given.stock is None:
        return [*lines, "stock Megatron has no such setting"]
    by_option = given.stock.by_option_us
    name = min(by_option, key=by_option.__getitem__)
    lines[0] += (
        f"; {gain[2]}: gain of the plan over {name} ({given.stock.us / 1e3:.0f} ms) {gain[0]:.1%} "
        f"({gain[1].low:.1%} to {gain[1].high:.1%})"
    )
    return [*lines, *option_hint(name, by_option)]


def _launch_lines(found: Found, schedule: str | None) -> list[str]:
    add, take_out = found.launch
    options = "--user-defined-schedule schedule.json"
    then = ["which is planned by:", *(f"    {command}" for command in found.commands())]
    if schedule is not None:
        directory = os.path.dirname(schedule)
        trace = f"--user-defined-schedule-trace {directory}/scheduled.trace.json"
        options = f"--user-defined-schedule {schedule} {trace}"
        then = [
            "and after the run ask whether other settings are faster by what it measured:",
            f"    megatron-ext report {directory}",
        ]
    out = [f"and take out of it: {' '.join(take_out)}"] if take_out else []
    return ["put into the launch script:", f"    {as_words(add)} {options}", *out, *then]
