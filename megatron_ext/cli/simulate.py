"""``megatron-ext simulate``: what one iteration takes."""

import click

from megatron_ext.cli.output import emit, json_option
from megatron_ext.cli.table_check import naming_files, planning_inputs, table_differences


@click.command()
@planning_inputs()
@click.option(
    "--schedule",
    "schedule_path",
    help="Without one: stock Megatron's own rule; at zero stage 3, every layer gathered anew.",
)
@click.option("--trace", help="Write a Chrome trace here.")
@json_option
def simulate(
    cost_table: str,
    workload_path: str,
    schedule_path: str | None,
    trace: str | None,
    extrapolate: bool,
    allow_differences: bool,
    this_machine: bool,
    as_json: bool,
) -> None:
    """Say what one iteration takes by a schedule, or by stock Megatron's own rule."""
    from megatron_ext.cost import cost_table as cost
    from megatron_ext.formats import trace as traces
    from megatron_ext.planner.evaluate import evaluate
    from megatron_ext.planner.verdict import rule_of
    from megatron_ext.schedule import match, validate
    from megatron_ext.workload import workload

    table, work = cost.load(cost_table), workload.load(workload_path)
    by = schedule_path or rule_of(work)
    given = validate.load(schedule_path) if schedule_path else None
    if given is not None:
        match.match(given, work, file=schedule_path)
    with naming_files(cost_table, workload_path):
        table_differences(table, work, this_machine=this_machine, allow=allow_differences, file=cost_table)
        result = evaluate(work, table, given, trace=bool(trace), extrapolate=extrapolate)
    if trace:
        about = {"kind": "simulated", "schedule": by, "iteration_time_us": result.iteration_time_us}
        assert result.events is not None  # asked for above
        traces.save(trace, result.events, about=about)
    emit(as_json, {"by": by, **result.as_json()}, f"by           {by}\n{result.as_text()}")
