"""``megatron-ext fit``: find the fastest settings that fit."""

import functools
import gc
import os
from itertools import chain

import click

from megatron_ext.cli.output import emit, fp8_lines, json_option, say_taken
from megatron_ext.cli.script_command import BareScriptCommand
from megatron_ext.formats import json_files


def fit_options(command):
    """Options of ``fit`` and ``prepare --fit`` that say what is searched."""
    for option in (
        click.option("--hardware", help="A machine's name (see: cost hardware), or a data sheet's path."),
        click.option(
            "--fix",
            "fixed",
            default="",
            metavar="NAMES",
            help="Settings that stay as given, separated by commas: zero-stage, optimizer-cpu-offload, recompute, "
            "micro-batch-size, sequence-parallel, a parallel size, delayed-parameter-update; or all.",
        ),
        click.option("--search-layout", is_flag=True, help="Also search parallel sizes."),
        click.option("--allow-delayed-update", is_flag=True, help="Try delayed updates, which change training."),
    ):
        command = option(command)
    return command


@click.command(cls=BareScriptCommand)
@fit_options
@click.option(
    "--cost-table",
    "cost_tables",
    multiple=True,
    help="Measured with the given settings; alone, or to correct the data sheet. Repeat for other micro-batch sizes.",
)
@click.option("--nodes", type=click.IntRange(1), default=1, show_default=True, help="Number of whole nodes.")
@click.option("--gpus", "world_size", type=click.IntRange(1), help="In place of --nodes: the number of all GPUs.")
@click.option("--picture", type=click.Path(), help="Write a picture (PNG) of time over device bytes.")
@click.option(
    "--out", type=click.Path(file_okay=False), help="Directory for workload, cost table and schedule of the fastest."
)
@click.argument("megatron_options", nargs=-1, type=click.UNPROCESSED)
@json_option
def fit(picture: str | None, out: str | None, fixed: str, megatron_options, as_json: bool, **asked) -> None:
    """Find the fastest settings that fit, from Megatron's options and a machine's name.

    MEGATRON_OPTIONS (after --) are those of describe. Model, global batch and precision stay as given, and so do the
    settings that --fix names. Needs neither torch nor Megatron nor a GPU. Nothing is measured.
    """
    from megatron_ext.megatron.ignored_options import not_given, sizes_taken
    from megatron_ext.planner.fit import fit_text
    from megatron_ext.planner.fit.fit_verdict import verdict_of_fit
    from megatron_ext.planner.fit.request import Request, fit_problem_of

    if asked["world_size"] is not None and asked["nodes"] > 1:
        raise click.UsageError("--gpus is the number of all GPUs: give it or --nodes")
    gc.disable()  # many small objects, most of which stay
    verb = click.get_current_context().info_name
    if picture:
        json_files.check_writable(picture)
    if out:
        json_files.make_directory(out)
        json_files.check_writable(os.path.join(out, "workload.json"))
    request = Request(words=with_defaults(tuple(megatron_options)), fixed=fixed_names(fixed), **asked)
    problem = fit_problem_of(request)
    if problem.passed_over:
        click.echo(f"{verb}: unknown here and ignored: {', '.join(problem.passed_over)}", err=True)
    for line in fp8_lines(megatron_options):
        click.echo(f"{verb}: {line}", err=True)
    found = answer(request, problem)
    say_taken(verb, sizes_taken(megatron_options) | not_given(megatron_options))
    if picture:
        from megatron_ext.report import fit_picture

        fit_picture.save(found, picture)
    if out:
        _write(out, found)
    said = verdict_of_fit(found)
    text = fit_text.as_text(found, said, os.path.join(out or "", "schedule.json"))
    emit(as_json, fit_text.as_json(found, said), text)


FIXED = {"fixed": "all", "search_layout": False, "allow_delayed_update": False, "cost_tables": (), "out": None}
advise = BareScriptCommand(
    "advise",
    callback=functools.partial(fit.callback or fit, **FIXED),
    params=[option for option in fit.params if option.name not in FIXED],
    help="Say whether a plan will help with the settings as they are given: fit --fix all.",
)


def with_defaults(words: tuple[str, ...]) -> tuple[str, ...]:
    """A command line, with Megatron's defaults added for options whose defaults differ in the example."""
    from megatron_ext.megatron.ignored_options import not_given

    return (*words, *chain.from_iterable(not_given(words).items()))


def fixed_names(text: str) -> tuple[str, ...]:
    """Settings that ``--fix`` names."""
    return tuple(name.strip().removeprefix("--") for name in text.split(",") if name.strip())


def answer(request, problem):
    """Search, and draw costs for the settings that are shown. If nothing fits, raises an InputError that says what
    would fit."""
    from megatron_ext.planner.fit import what_fits
    from megatron_ext.planner.fit.found import judge
    from megatron_ext.planner.fit.search_settings import NothingFits

    try:
        return judge(request, problem, problem.search())
    except NothingFits as error:
        raise what_fits.explained(problem, error) from None


def _write(out: str, found) -> None:
    from msgspec.structs import replace

    from megatron_ext import planner
    from megatron_ext.cost import cost_table
    from megatron_ext.schedule import user_defined_schedule
    from megatron_ext.schedule.memory_bill import memory_bill
    from megatron_ext.schedule.validate import validate
    from megatron_ext.simulator.simulation import simulate, with_prediction
    from megatron_ext.simulator.timing import Timing
    from megatron_ext.workload import workload

    winner = found.fit.winner
    paths = {name: os.path.join(out, f"{name}.json") for name in ("workload", "cost_table", "schedule")}
    work = winner.setting.workload(found.limits)
    table = found.problem.costs.of(winner.setting, work)
    workload.save(paths["workload"], work)
    cost_table.save(paths["cost_table"], table)
    made = winner.schedules[0] if winner.planned else planner.plan(work, table)
    assert made.predicted is not None
    free = made.uses_drive and table.routes.nvme is None  # states on a drive without costs seem to take no time
    if len(winner.schedules) == 1 and (free or winner.us < made.predicted.iteration_time_us):  # a quick plan is faster
        timing = Timing(work, table)
        quick = validate(replace(winner.schedules[0], metadata=made.metadata, limits=work.limits))
        bills = tuple(memory_bill(quick, work))
        made = with_prediction(quick, simulate(work, timing, quick)._replace(memory=bills))
    metadata = replace(made.metadata, cost_table_sha256=json_files.sha256(paths["cost_table"]))
    user_defined_schedule.save(paths["schedule"], replace(made, metadata=metadata))
