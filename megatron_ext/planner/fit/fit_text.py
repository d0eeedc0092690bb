"""The result of ``fit``, as text for one screen and as one JSON object."""

import shlex

import msgspec

from megatron_ext.formats import rank_memory
from megatron_ext.planner.fit.estimate_setting import Choice
from megatron_ext.planner.fit.fit_verdict import FitVerdict
from megatron_ext.planner.fit.found import MOST_EQUAL, Found
from megatron_ext.planner.fit.search_settings import Fit
from megatron_ext.planner.fit.setting import Setting, as_words
from megatron_ext.planner.last_lines import GIB, last_lines
from megatron_ext.planner.verdict import Verdict, option_hint
from megatron_ext.planner.what_limits import WORDS, limit_of

MOST_WAYS = 8
NEARLY = "~: estimated by quick plans, which decide less than a full plan; a full plan may be faster"
QUICK = "planned by quick rules, whose plan --out writes; these commands plan in full, which may take minutes"
ALL_ON_HOST = "gradients in host memory, shards in host memory, optimizer on the host"


def equal_to_winner(found: Found) -> list[Choice]:
    """Choices that are as fast as the winner, as far as costs are known; the fastest first."""
    fit = found.fit
    others = [one for one in fit.tried if one.setting != fit.winner.setting]
    return [one for one in others[:MOST_EQUAL] if found.certainty.equal(one, fit.winner)]


def ms_of(choice: Choice) -> str:
    """The choice's iteration time in milliseconds, marked if it comes from a quick plan."""
    return f"{'' if choice.planned else '~'}{choice.us / 1e3:.0f}"


def way_of(choice: Choice) -> str:
    """Where a choice keeps its gradients, shards and optimizer states, in words."""
    groups = choice.schedules[-1].groups
    whole = sum(group.bytes for group in groups) or 1

    def share(wanted) -> float:
        return sum(group.bytes for group in groups if wanted(group)) / whole

    host, own = (share(lambda group, place=place: group.gradients == place) for place in ("host", "sharded"))
    words = ["recompute" if choice.setting.batch.recompute else "no recompute"]
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
        **{name: getattr(choice, name) for name in "tokens_per_s device_bytes host_bytes drive_bytes planned".split()},
        "limit": limit_of(busy, choice.us),
        "busy_us": busy,
        "exposed_us": choice.times.exposed_us,
        "lower_bound_us": choice.bound_us,
        "distance_to_bound": choice.us / choice.bound_us - 1,
        "way": way_of(choice),
        "equal_to_winner": found.certainty.equal(choice, found.fit.winner),
        "memory": msgspec.to_builtins(choice.memory),
    }


def as_json(found: Found, said: FitVerdict) -> dict:
    """Every figure; times in microseconds."""
    fit, (add, take_out) = found.fit, found.launch_of(found.fit.winner.setting)
    return {
        "estimated": found.problem.sheet is not None,
        "hardware": found.problem.sheet and found.problem.sheet.title,
        "settings": {"all": fit.settings, "do_not_fit": fit.pruned, "not_tried": fit.left_out},
        "lower_bound_us": fit.bound_us,
        "frontier": [_figures(found, choice) for choice in fit.frontier],
        "equal": [one.setting.options() for one in equal_to_winner(found)],
        "ways": {name: one.us for name, one in best_by_way(fit).items()},
        "given": _given_json(found, said),
        "stock": [
            {"options": setting.options(), "device_bytes": stock.device_bytes, "by_option_us": stock.by_option_us}
            for setting, stock in found.stock
        ],
        "answer": said.answer,
        "verdict": said.conclusion,
        "runs": [run._asdict() for run in said.runs],
        "launch": {"add": as_words(add), "take_out": take_out},
        "commands": found.commands(),
        "draws": found.certainty.draws,
    }


def _given_json(found: Found, said: FitVerdict) -> dict:
    given, refused = found.given
    if given is None:
        return {"refused": refused}
    figures, gain = _figures(found, given), _gain(found, said)
    if found.given_stock is not None:
        figures["stock_by_option_us"] = found.given_stock.by_option_us
    return figures if gain is None else figures | dict(zip(("gain", "gain_low", "gain_high", "answer"), gain[1:]))


def _gain(found: Found, said: FitVerdict) -> tuple[str, float, float, float, str] | None:
    """The gain of a plan of the settings as given: over what, the gain, the ends of its interval and the answer. It
    comes from ``plan``. If there are only quick plans, it comes from these on drawn costs, provided that stock Megatron
    has this setting."""
    given, planned = found.given[0], said.given and said.given.figures
    if planned is not None and planned["answer"] is not None:
        over = f"{planned['compared_with']} ({planned['compared_with_us'] / 1e3:.0f} ms)"
        return over, planned["gain"], planned["gain_low"], planned["gain_high"], planned["answer"]
    stock = found.given_stock
    if given is None or stock is None:
        return None
    gain, interval, answer = found.certainty.gain_over(given, given.setting, stock, given.rounds)
    return f"{stock.option} ({stock.us / 1e3:.0f} ms)", gain, interval.low, interval.high, answer


def as_text(found: Found, said: FitVerdict, schedule: str = "schedule.json") -> str:
    """Text for one screen, with the answer at its end. ``schedule``: path of the winner's."""
    words = shlex.join(found.words())
    commands = [f"ARGS=({words})", *(command.replace(words, '"${ARGS[@]}"') for command in found.commands())]
    said_by = (f"    {command}" for command in commands)
    return "\n".join([*lines(found, said), "", "planned by:", *said_by, "", *said.lines(found, schedule)])


def as_prepared(found: Found, answer: FitVerdict, judged: Verdict, directory, by: str) -> tuple[list[str], list[str]]:
    """The text that ``prepare`` prints after it has measured and planned the winner, and its last lines. ``by``:
    options that train by the schedule."""
    after = "after the run, check with its measured costs whether other settings are faster:"
    add, take_out = found.launch_of(found.fit.winner.setting)
    trace, directory = (shlex.quote(f"{directory}{name}") for name in ("/scheduled.trace.json", ""))
    options = f"{as_words(add)} {by} --user-defined-schedule-trace {trace}"
    said = [*lines(found, answer), "", after, f"    megatron-ext report {directory}"]
    return said, last_lines(judged.conclusion, judged.runs, add=options.strip(), take_out=" ".join(take_out))


def lines(found: Found, said: FitVerdict) -> list[str]:
    """All lines except the answer."""
    fit, problem = found.fit, found.problem
    winner, given = fit.winner, problem.space.given
    measured = problem.costs.table is not None and not problem.costs.table.metadata.synthetic
    by = "By a measured cost table" if measured else "ESTIMATED from a data sheet, not measured"
    planned = sum(choice.planned for choice in fit.tried)
    limits = found.limits
    host = "" if limits.host_bytes is None else f", and {limits.host_bytes / GIB:.1f} GiB of a node's host memory"
    return [
        f"{parameters_text(given)}, {given.shape.dtype}; GPUs: {given.parallel.world_size}"
        + (f" of {problem.sheet.title}" if problem.sheet else ""),
        f"a global batch of {given.samples} x {given.batch.seq_length} tokens. {by}.",
        f"{fit.settings} settings: {fit.pruned} do not fit, {planned} planned in full"
        + (f", {fit.left_out} not tried although their bound is lower than the fastest" if fit.left_out else ""),
        f"by the memory bill, a run may fill {(limits.device_bytes or 0) / GIB:.1f} GiB of a device{host}",
        "",
        f"{'device GiB':>10} {'ms':>8} {'interval':>18} {'tokens/s':>9} {'host GiB':>8} {'over bound':>10}  "
        f"{'limit':20} settings",
        *(_row(found, choice) for choice in fit.frontier),
        *([] if all(choice.planned for choice in (*fit.frontier, *fit.tried)) else [NEARLY]),
        "",
        *_equal_lines(found),
        *_way_lines(found),
        *_given_lines(found, said),
        f"memory of the fastest (*): {rank_memory.text(winner.memory)}",
        *([] if winner.planned else [QUICK]),
    ]


def parameters_text(setting: Setting) -> str:
    """The number of parameters in words: "1.62B parameters"."""
    numel = setting.shape.numel
    return f"{numel / 1e9:.3g}B parameters" if numel >= 1e9 else f"{numel / 1e6:.3g}M parameters"


def _row(found: Found, choice: Choice) -> str:
    interval = found.certainty.interval(choice)
    mark = "=" if found.certainty.equal(choice, found.fit.winner) else " "
    if choice is found.fit.winner:
        mark = "*"
    limit = WORDS[limit_of(choice.times.busy_us, choice.us)]
    drive = f", {choice.drive_bytes / GIB:.0f} GiB on the drive" if choice.drive_bytes else ""
    times = f"{interval.low / 1e3:.0f} to {interval.high / 1e3:.0f}"
    over = f"{choice.us / choice.bound_us - 1:.1%}" if choice.planned else ""  # quick plans have a looser bound
    return (
        f"{mark}{choice.device_bytes / GIB:>9.1f} {ms_of(choice):>8} {times:>18} {choice.tokens_per_s:>9,.0f} "
        f"{choice.host_bytes / GIB:>8.1f} {over:>10}  {limit:20} "
        f"{found.text(choice)}{drive}"
    )


def _equal_lines(found: Found) -> list[str]:
    equal = equal_to_winner(found)
    if not equal:
        return []
    return [
        f"equal to the fastest (*) as far as costs are known ({found.certainty.draws} draws):",
        *(f"  {ms_of(one)} ms, {one.device_bytes / GIB:.1f} GiB: {found.text(one)}" for one in equal),
    ]


def _way_lines(found: Found) -> list[str]:
    ways = best_by_way(found.fit)
    if len(ways) < 2:
        return []
    lines = ["the fastest by where gradients, shards and the optimizer are, within these bytes:"]
    lines += [f"  {ms_of(one)} ms: {way} ({found.text(one)})" for way, one in ways.items()]
    winner = found.fit.winner
    on_host = next((one for way, one in ways.items() if way.endswith(f", {ALL_ON_HOST}")), winner)
    if way_of(on_host) != way_of(winner):
        ratio = found.certainty.ratio(on_host, winner)
        sure = "beats" if ratio.low > 1 else "cannot be told from"
        lines.append(
            f"{way_of(winner)} {sure} everything on the host: {ms_of(winner)} ms, {ms_of(on_host)} "
            f"({ratio.low:.2f} to {ratio.high:.2f} times as long)"
        )
    return lines


def _given_lines(found: Found, said: FitVerdict) -> list[str]:
    given, refused = found.given
    if given is None:
        return [f"as given it {'is refused' if found.problem.refused else 'does not fit'}: {refused}"]
    line, gain = f"as given: {ms_of(given)} ms, {given.device_bytes / GIB:.1f} GiB", _gain(found, said)
    if gain is not None:
        line += f"; {gain[4]}: gain of the plan over {gain[0]} {gain[1]:.1%} ({gain[2]:.1%} to {gain[3]:.1%})"
    if found.given_stock is None:
        return [line, "stock Megatron has no such setting"]
    return [line, *option_hint(found.given_stock.option, found.given_stock.by_option_us)]
