"""``megatron-ext plan``: make a schedule from a cost table and a workload."""

import click

from megatron_ext.cli.checkout_model import checkout_option, refuse_script, said_options, use_megatron_of
from megatron_ext.cli.output import emit, json_option
from megatron_ext.cli.script_command import ScriptCommand, entry_option, values
from megatron_ext.cli.table_check import ALLOW, naming_files, planning_inputs, table_differences
from megatron_ext.formats.errors import InputError


def _refuse_sources(path: str | None, checkout: str | None, entry: str | None, script_arguments) -> None:
    """Require one source of the workload: a file, or a checkout's script. InputError names what is missing or too
    much."""
    if path is None and not checkout:
        raise InputError("is needed, or --checkout DIR with the script's arguments after --", field="--workload")
    if path is not None and not (checkout or entry) and (options := values(script_arguments)):
        raise InputError("belongs to the workload; give it to describe", field=next(iter(options)))
    if path is not None and (checkout or entry or script_arguments):
        said = "cannot be combined with --checkout and the script's arguments; give one"
        raise InputError(said, field="--workload", value=path)


def _workload(path: str | None, checkout: str | None, entry: str | None, words, refuse_table):
    if path is not None:
        from megatron_ext.workload import workload

        return workload.load(path)
    use_megatron_of(checkout, entry)
    from megatron_ext.megatron import script_arguments
    from megatron_ext.megatron.describe_from_checkout import describe_command_line

    script = script_arguments.read(words, verb="plan")
    refuse_script(script, "plan")
    refuse_table(said_options(script))
    return describe_command_line(checkout, words, entry).workload


def _notes(planned, work, table) -> dict[str, str | None]:
    from megatron_ext import planner
    from megatron_ext.cost.activations import missing_activations
    from megatron_ext.cost.device_reserve import reserve_note
    from megatron_ext.planner.what_limits import LIMIT_UNKNOWN
    from megatron_ext.schedule.memory_bill import host_bytes_of_nodes

    limit = work.limits.host_bytes
    near = limit is not None and max(host_bytes_of_nodes(planned, work)) > limit / 2
    return {
        "activations_note": missing_activations(work, table),
        "search_note": planner.search_note(planned),
        "step_note": planner.step_note(planned),
        "limit_note": LIMIT_UNKNOWN if near else None,
        "reserve_note": None if work.limits.device_bytes is None else reserve_note(work),
    }


def _judged(work, table, planned, extrapolate: bool, file: str):
    """The verdict, the schedules of the ramp, and the gain of a delayed update."""
    from megatron_ext import planner
    from megatron_ext.planner.missing_figures import missing_curves, refuse_missing

    refuse_missing(missing_curves(work, table, planned, extrapolate=extrapolate), file=file)
    judged = planner.verdict(work, table, planned, extrapolate=extrapolate)
    ramp = planner.plan_ramp(planned, work, table, extrapolate=extrapolate)
    return judged, ramp, planner.delay(planned, work, table, extrapolate=extrapolate)


@click.command(cls=ScriptCommand)
@planning_inputs(workload_required=False)
@checkout_option
@entry_option
@click.option("--out", required=True, help="Where the schedule is written; a directory if the batch size grows.")
@click.option(
    "--policy",
    default="hybrid",
    show_default=True,
    help=(
        "hybrid, exact, random:SEED, gathers-only, or a baseline: all-gpu, all-cpu, window-1 or -2, share-25, -50 or "
        "-75, urgency, pipeswitch, hierarchical."
    ),
)
@click.option(
    "--explain",
    "explained",
    metavar="GROUP",
    multiple=True,
    help="Say why a group is planned as it is: its number, or the name of one of its parameters. May be repeated.",
)
@click.argument("script_arguments", nargs=-1, type=click.UNPROCESSED)
@json_option
def plan(
    cost_table,
    workload_path,
    checkout,
    entry,
    script_arguments,
    out,
    policy,
    explained,
    extrapolate,
    this_machine,
    allow_differences,
    as_json,
) -> None:
    """Decide when, by which route and for how long each group is whole; print the gain.

    SCRIPT_ARGUMENTS (after --) are those of the training script. With --checkout they replace the workload file.
    """
    from megatron_ext import planner
    from megatron_ext.cost import cost_table as cost
    from megatron_ext.cost import environment
    from megatron_ext.formats import json_files
    from megatron_ext.planner.last_lines import training_by
    from megatron_ext.planner.policies import check_policy
    from megatron_ext.schedule import schedules
    from megatron_ext.schedule import user_defined_schedule as schedule

    _refuse_sources(workload_path, checkout, entry, script_arguments)
    check_policy(policy)
    table = cost.load(cost_table)

    def refuse_table(sizes) -> None:
        found = environment.size_differences(table.metadata, sizes)
        environment.refuse(found, allow=allow_differences, file=cost_table, how=ALLOW)

    work = _workload(workload_path, checkout, entry, script_arguments, refuse_table)
    (json_files.make_directory if work.ramp else json_files.check_writable)(out)
    with naming_files(cost_table, workload_path or str(checkout)):
        differences = table_differences(table, work, this_machine, allow_differences, file=cost_table)
        digest = json_files.sha256(cost_table)
        found = planner.planned(work, table, policy=policy, cost_table_sha256=digest, extrapolate=extrapolate)
        planned, reasons = found.schedule, {group: planner.explain(found, group) for group in explained}
        judged, ramp, delay = _judged(work, table, planned, extrapolate, cost_table)
    schedules.save(out, [*ramp, planned]) if ramp else schedule.save(out, planned)
    notes = _notes(planned, work, table) | {"ramp_note": planner.ramp_note(ramp)}
    notes["delay_note"] = delay.text() if delay is not None else None
    more = [planner.set_up_line(planned, work, table), planner.never_whole_line(planned, work), *notes.values()]
    figures = {"schedule": out, "policy": policy, "verdict": judged.text} | judged.figures | notes
    last = judged.ending(training_by(out, planned))
    figures |= {"delay": delay and delay._asdict(), "differences": differences, "ramp": planner.ramp_us(ramp)}
    text = "\n".join(line for line in (*reasons.values(), *judged.said, *more, *last) if line is not None)
    emit(as_json, figures | {"explained": reasons}, text)
