"""A report as a table for the terminal, as a JSON object, and as a page."""

import io
from collections import Counter
from collections.abc import Iterable, Sequence

from msgspec import to_builtins
from rich import box
from rich.console import Console
from rich.table import Table

from megatron_ext.formats.facts import CAUTION, RANKS_PER_DEVICE, shared_device
from megatron_ext.formats.metrics import Metrics
from megatron_ext.formats.rank_memory import DEVICE_KINDS, HOST_KINDS, RankMemory
from megatron_ext.planner.last_lines import ComparedRun, last_lines, training_by
from megatron_ext.planner.stock import OVERLAPPED
from megatron_ext.planner.what_limits import LIMIT_UNKNOWN
from megatron_ext.report import moved, parts
from megatron_ext.report.build_report import Report
from megatron_ext.report.equality import largest_loss_difference
from megatron_ext.report.links_busy import NAMES, Hidden
from megatron_ext.report.run_dir import COMPARED, GATHERS_ONLY, READ, WRITTEN
from megatron_ext.report.spread import Spread
from megatron_ext.report.turn_ratio import WRONG
from megatron_ext.workload.route import ROUTE_KINDS

MEASURED = {"gather_us": "gather time in training", "exposed_us": "exposed time", "iteration_time_us": "iteration time"}
"""Measured figures in the order in which they are shown."""

MUCH_LONGER = 1.25
"""If a run took this many times its prediction, the line of the verdict says so."""

PAGE_COLUMNS = 1000
"""On the page no line of the text is wrapped."""

NOT_KNOWN = "a gain is predicted and not measured"
WITHOUT_METRICS = "; losses, equality and memory need metrics, which only the example writes"

OTHER_LAYOUT = (
    "Stock Megatron's own bucket layout adds gradients up in another order, so its last bits differ without any fault"
)

EXPLAINED = {
    "gather time in training": "the training thread's time for issuing, publishing and waiting; the largest over ranks",
    "ratio": "the scheduled run's median divided by the compared run's",
    "exposed time": "the part of it in which a step waited for a group",
    "iteration time": "from a barrier to the end of the optimizer step, the slowest rank",
    "the pause before it": "ranks average the loss, log and meet; gathers and publishing may run there",
    "the lower bound": "an iteration time that no schedule of this workload can beat, by the same costs",
    "links": "means over ranks; an all-gather counts from when all have issued it; `nvme`: the drive, `cpu`: host link",
    "hidden": "the mean time over ranks, and the share of it in which a step of the rank computed; on a GPU "
    "all-gathers and reduces are not recorded",
    "bytes moved": "as billed, and as counted when the run issued them; `host memory`: what the processor reads and "
    "writes, and each byte of other copies once; `network`: what a rank receives from collectives",
    "predicted": "by the simulator from the cost table; the error is relative to the measured median",
}


def as_json(report: Report) -> dict:
    """The object that ``report --json`` prints: medians, and their spread."""
    spread = {name: {k: v and v._asdict() for k, v in getattr(report, name)._asdict().items()} for name in MEASURED}
    return {
        "iterations": report.run.iterations,
        "bitwise_equal": report.equality.bitwise,
        **{name: {k: v and v["median_us"] for k, v in pair.items()} for name, pair in spread.items()},
        "predicted_iteration_time_us": report.predicted_iteration_time_us._asdict(),
        "predicted_relative_error": report.relative_error._asdict(),
        "spread": spread,
        "differences": list(report.equality.differences),
        "compared_with": compared_with(report),
        "measured_ratio": report.measured_ratio._asdict() if report.measured_ratio else None,
        "verdict_was": report.verdict_was,
        "verdict": {name: report.verdict.figures[name] for name in ("answer", "gain", "gain_low", "gain_high")},
        "links_busy": report.links_busy,
        "hidden": {how: {name: one._asdict() for name, one in own.items()} for how, own in report.hidden.items()},
        "moved_bytes": moved.as_json(report.moved),
        **parts.as_json(report.parts, report.missed_us),
        "memory": [
            {"pp_rank": rank, **to_builtins({"bill": bill, "census": census}), "relative_error": error(bill, census)}
            for rank, (bill, census) in enumerate(report.memory)
        ],
    }


def error(bill: RankMemory, census: RankMemory) -> float:
    """The difference of the device's bill from the census, relative to the census."""
    return bill.device_total_bytes / census.device_total_bytes - 1.0


def memory_rows(report: Report) -> list[tuple[str, str, str, str]]:
    """Rows ``(what, bill, census, bill / census)`` of every rank and kind, on the device and in host memory."""
    lines = []
    for rank, (bill, census) in enumerate(report.memory):
        for place, kinds in (("device", DEVICE_KINDS), ("host", HOST_KINDS)):
            both = [getattr(memory, f"{place}_bytes") for memory in (bill, census)]
            of = "" if place == "device" else "host "
            named = [(kind, of + kind.removeprefix("host_").replace("_", " ")) for kind in kinds]
            held = [(title, [sizes.get(kind, 0) for sizes in both]) for kind, title in named]
            held.append((f"{place} in all", [sum(sizes.values()) for sizes in both]))
            for title, sizes in held:
                if any(sizes):
                    shown = (f"{size / 2**20:.2f}" for size in sizes)
                    lines.append((f"  rank {rank}, {title}, MiB", *shown, _ratio(*sizes) if sizes[1] else ""))
    return [("memory at the peak", "bill", "census", ""), *lines] if lines else []


def compared_with(report: Report) -> str:
    """A description of the run that the schedule is compared with."""
    run = report.run
    if run.stock is None:
        lacks = [READ[key] for key in COMPARED if not run.file(key).exists()]
        return f"nothing, without {', '.join(lacks)}: {NOT_KNOWN}{WITHOUT_METRICS if run.scheduled is None else ''}"
    if run.gathers_only is not None:
        rule = run.gathers_only.metadata.planner
        return f"the best plan by all-gathers alone ({rule}); stock Megatron has no zero stage 3"
    if run.workload.zero_stage < 3:
        return OVERLAPPED
    return f"{OVERLAPPED}, which keeps whole parameters (zero stage 1): it has no zero stage 3"


def rows(report: Report) -> list[tuple[str, str, str, str]]:
    """All rows of the table: ``(what, compared run, scheduled run, scheduled / compared)``."""
    run, equal = report.run, {None: "not checked", True: "bitwise", False: "NO"}[report.equality.bitwise]
    difference = largest_loss_difference(run.stock, run.scheduled)

    def times(title: str, stock: float | None, ours: float) -> tuple[str, str, str, str]:
        return title, _ms(stock), _ms(ours), _ratio(ours, stock)

    lines = [
        ("iterations", f"{run.iterations}", f"{run.iterations}", ""),
        ("loss, first", _loss(run.stock, 0), _loss(run.scheduled, 0), ""),
        ("loss, last", _loss(run.stock, -1), _loss(run.scheduled, -1), ""),
        ("  largest relative difference", "", "-" if difference is None else f"{difference:.1e}", ""),
        ("equal to the reference", "", equal, ""),
    ]
    for name, title in MEASURED.items():
        stock, ours = getattr(report, name)
        lines.append(times(f"{title}, ms, median", stock and stock.median_us, ours.median_us))
        lines.append(("  p10 - p90", _range(stock), _range(ours), ""))
    stock, ours = report.period_us
    if stock is not None and ours is not None:
        lines.append(times("  with the pause before it, ms", stock.median_us, ours.median_us))
    stock, ours = report.predicted_iteration_time_us
    lines.append(times("iteration time, ms, predicted", stock, ours))
    errors = ["-" if error is None else f"{100 * error:+.1f} %" for error in report.relative_error]
    return [*lines, ("  error of the prediction", errors[0], errors[1], "")]


def _range(spread: Spread | None) -> str:
    return "-" if spread is None else f"{_ms(spread.p10_us)} - {_ms(spread.p90_us)}"


def _loss(run: Metrics | None, index: int) -> str:
    if run is None:
        return "-"
    value = run.loss[index]
    return "not a number" if value is None else f"{value:.7f}"


def _ms(us: float | None) -> str:
    return "-" if us is None else f"{us / 1e3:.3f}"


def _ratio(ours: float, stock: float | None) -> str:
    return f"{ours / stock:.3f}" if stock else ""


def _title(report: Report) -> str:
    p = report.run.workload.parallel
    return (
        f"PP {p.pp} x VP {p.vp} x DP {p.data_parallel_size}, {p.num_microbatches} micro-batches, zero stage "
        f"{report.run.workload.zero_stage}; medians over {report.iteration_time_us.scheduled.samples} iterations, the "
        f"first {report.run.counted[0]} left out"
    )


def verdict_line(report: Report) -> str:
    """The plan's verdict next to the measured ratio."""
    run, (stock, ours) = report.run, report.iteration_time_us
    line, without_limit, others = f"{report.verdict.conclusion}; ", False, 0.0
    of_stock_us, of_ours_us = report.predicted_iteration_time_us
    by = ours.median_us / of_ours_us
    if stock is None:
        line += "not checked: training without this schedule was not measured"
    else:
        line += _measured_ratio(report, ours.median_us / stock.median_us)
        others = stock.median_us / of_stock_us
        limits = [one and one.host_limit_bytes for one in (run.scheduled, run.stock)]
        if limits[0] != limits[1]:
            line += f"; measured {_limit_text(limits[0])}, {_whose(report)} {_limit_text(limits[1])}"
            without_limit = limits[1] is None
    if by > MUCH_LONGER:
        line += f"; it took {by:.2f} times the predicted time"
        line += f", {_whose(report)} {others:.2f} times its own" if others else ""
        if without_limit and by < MUCH_LONGER * others:
            line += ", without a limit: the limit explains little of it"
        elif run.workload.limits.host_bytes is not None:
            line += f". {LIMIT_UNKNOWN}"
    return line


def _measured_ratio(report: Report, took: float) -> str:
    ratio = report.measured_ratio
    if ratio is None:
        turns = "too few turns" if report.run.turn_iterations else "no turns"
        line = f"not checked by the measured ratio: the runs took {turns}, so it includes the machine's drift"
    else:
        took, was = ratio.ratio, f", so the verdict is {report.verdict_was}" if report.verdict_was else ""
        measured = f"{took:.3f} +- {ratio.standard_error:.3f} of {_whose(report)} iteration time"
        line = f"measured {measured} (standard error, {ratio.turns} turns){was}"
    return line + (f"; this run took LONGER, {took:.2f} times {_whose(report)} iteration time" if took > 1 else "")


def _limit_text(limit_bytes: int | None) -> str:
    return "without a limit on memory" if limit_bytes is None else f"within a limit of {limit_bytes / 2**20:.0f} MiB"


def ending(report: Report) -> list[str]:
    """The last lines: what was measured, and what the plan said."""
    stock, ours = report.iteration_time_us
    planned, *without = report.verdict.runs
    by_schedules, faster = report.run.gathers_only is not None, stock is None or ours.median_us < stock.median_us
    runs = [planned._replace(iteration_time_us=ours.median_us, by="measured by this schedule")]
    if stock is not None:
        host_bytes = None if by_schedules or not without else without[0].host_bytes
        runs.append(ComparedRun(f"measured by {compared_with(report)}", stock.median_us, host_bytes))
    many = report.run.workload.ramp and not (report.run.path / READ["schedule"]).exists()
    own = "schedules" if many else READ["schedule"]
    name, schedule = ((GATHERS_ONLY, report.run.gathers_only), (own, report.run.schedule))[faster]
    needed = by_schedules or (faster and (report.verdict.is_needed or report.verdict_was == WRONG))
    add = training_by(report.run.path / name, schedule) if needed and schedule is not None else ""
    return last_lines(verdict_line(report), runs, add=add)


def hidden_lines(report: Report) -> list[str]:
    """For each kind of copy and the host's step, its time and the hidden share, measured next to simulated."""
    measured, simulated = (report.hidden[how] for how in ("measured", "simulated"))

    def of(found: dict[str, Hidden], name: str) -> str:
        return f"{_ms(found[name].us)} ms, {found[name].share:.0%}" if name in found else "-"

    names = [name for name in NAMES.values() if name in measured or name in simulated]
    return [f"{name}: measured {of(measured, name)}; simulated {of(simulated, name)}" for name in names]


def _whose(report: Report) -> str:
    return "stock's" if report.run.gathers_only is None else "the best all-gathers'"


def cautions(report: Report) -> list[str]:
    """Warnings about the limits of the measured times."""
    measured_on = report.run.schedule.metadata.options.measured_on
    hardware = (measured_on.hardware if measured_on is not None else None) or {}
    found = [shared_device(hardware[RANKS_PER_DEVICE])] if RANKS_PER_DEVICE in hardware else []
    return [*found, str(hardware[CAUTION])] if CAUTION in hardware else found


def details(report: Report) -> list[tuple[str, str]]:
    """Lines about the plan and its outcome, each with a word that names its subject."""
    used = Counter(route for _, route in {(action.group, action.route) for action in report.run.schedule.unshards})
    busy = {how: ", ".join(f"{name} {of:.0%}" for name, of in own.items()) for how, own in report.links_busy.items()}
    routes = [f"{used[name]} group{'s' if used[name] > 1 else ''} by {name}" for name in ROUTE_KINDS if used[name]]
    return [
        ("routes", ", ".join(routes) or "no group is gathered"),
        *(("links", f"carry bytes, {how}: {said} of the iteration") for how, said in busy.items() if said),
        *(("hidden", line) for line in hidden_lines(report)),
        *(("bytes", line) for line in moved.lines(report.moved)),
        *(("part", line) for line in parts.lines(report.parts, report.missed_us)),
        *(("plan", line) for line in report.verdict.said),
    ]


def _for_terminal(rows: Iterable[Sequence[str]], head: Sequence[str] = ()) -> Table:
    """A table with a title and three figures per row."""
    table = Table(box=box.SIMPLE_HEAD, show_header=bool(head))
    for title, justify in zip(head or ("",) * 4, ("left", "right", "right", "right")):
        table.add_column(title, justify=justify, no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table


def as_text(report: Report, width: int | None = None) -> str:
    """The table for people, with the plan's verdict and the paths of the files."""
    # rich aligns the table and fits it to the terminal.
    table = _for_terminal(rows(report), ("", report.run.stock_name, "scheduled", "ratio"))
    memory = _for_terminal([*memory_rows(report), *moved.rows(report.moved)])
    detail = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    detail.add_column(no_wrap=True)
    detail.add_column(overflow="fold")
    said = [("equality", report.equality.text), ("compared with", compared_with(report))]
    for word, line in (*said, *(("note", note) for note in cautions(report)), *details(report)):
        detail.add_row(word, line)
    files = {**{name: report.run.file(name) for name in WRITTEN}, "all files": report.run.path}
    text = io.StringIO()
    console = Console(file=text, width=width or max(Console().width, 96))
    console.print(_title(report), soft_wrap=True)
    console.print(table)
    if report.memory or report.moved:
        console.print(memory)
    console.print(detail)
    for name, path in files.items():  # paths are copied from here, so they are not wrapped
        console.print(f"{name:<9}  {path}", soft_wrap=True, markup=False, highlight=False)
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines())


def as_markdown(report: Report) -> str:
    """The page that is written next to the run's files: the text for people with its last lines, what its words mean,
    the timeline, and the losses."""
    run = report.run
    lines = ["# The planned schedule and the run that it is compared with", "", "```text"]
    lines += [as_text(report, width=PAGE_COLUMNS), *ending(report), "```", ""]
    lines += [*(f"- **{word}**: {meaning}." for word, meaning in EXPLAINED.items()), "", f"{OTHER_LAYOUT}."]
    lines += ["", "## One iteration", "", f"![timeline]({WRITTEN['timeline']})", ""]
    traces = [f"`{READ[key]}`" for key in ("stock_trace", "scheduled_trace") if run.file(key).exists()]
    lines += [f"Perfetto (ui.perfetto.dev) opens {' and '.join(traces)}."]
    if run.scheduled is not None:
        lines += ["", "## Losses", ""]
        lines += [f"| iteration | {run.stock_name} | scheduled | reference |", "|---:|---:|---:|---:|"]
    for index in range(run.iterations if run.scheduled is not None else 0):
        losses = (_loss(each, index) for each in (run.stock, run.scheduled, run.reference))
        lines.append(f"| {index + 1} | {' | '.join(losses)} |")
    return "\n".join([*lines, ""])
