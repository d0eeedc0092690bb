"""``megatron-ext simulate``: how long one iteration takes."""

import click

from megatron_ext.cli.output import emit, json_option
from megatron_ext.cli.table_check import naming_files, planning_inputs, table_differences


@click.command()
@planning_inputs()
@click.option(
    "--schedule",
    "schedule_path",
    help="Default: stock Megatron's own rule; at zero stage 3, a gather of every layer for each use.",
)
@click.option("--trace", help="Where a Chrome trace is written.")
@json_option
def simulate(
    cost_table, workload_path, schedule_path, trace, extrapolate, this_machine, allow_differences, as_json
) -> None:
    """Print how long one iteration takes by a schedule, or by stock Megatron's own rule."""
    from megatron_ext.cost import cost_table as cost
    from megatron_ext.cost.activations import missing_activations, with_activations
    from megatron_ext.formats import trace as traces
    from megatron_ext.planner.evaluate import evaluate
    from megatron_ext.planner.last_lines import ComparedRun, by_time, last_lines, training_by
    from megatron_ext.planner.missing_figures import interval_of, refuse_missing
    from megatron_ext.planner.verdict import rule_of
    from megatron_ext.planner.what_limits import limit_of, limit_text
    from megatron_ext.planner.without_plan import stock_bytes, without_plan
    from megatron_ext.schedule import match, validate
    from megatron_ext.schedule.memory_bill import host_bytes_of_nodes
    from megatron_ext.simulator.simulation import Result
    from megatron_ext.workload import workload

    table, work = cost.load(cost_table), workload.load(workload_path)
    by = schedule_path or rule_of(work)
    given = validate.load(schedule_path) if schedule_path else None
    if given is not None:
        match.match(given, work, file=schedule_path)
        if (limit := given.limits.device_bytes) is not None:
            match.check_device_bytes(given, with_activations(work, table), limit, file=schedule_path)
    with naming_files(cost_table, workload_path):
        table_differences(table, work, this_machine, allow_differences, file=cost_table)

        def simulated_on(table, trace: bool = False) -> Result:
            return evaluate(work, table, given, trace=trace, extrapolate=extrapolate)

        result = simulated_on(table, bool(trace))
        refuse_missing(result.left_out, file=cost_table)
        interval = interval_of(table, result, lambda each: simulated_on(each).iteration_time_us)
    if trace:
        about = {"kind": "simulated", "schedule": by, "iteration_time_us": result.iteration_time_us}
        assert result.events is not None  # asked for above
        traces.save(trace, result.events, about=about)
    figures = {"by": by, "order": work.parallel.order, **result.as_json(), "interval": interval and interval._asdict()}
    lines = [f"by           {by}", f"order        {work.parallel.order}", result.as_text()]
    lines += filter(None, (missing_activations(work, table), interval and interval.text()))
    known = f"{result.iteration_time_us / 1e3:.3f} ms by {by}"
    if interval:
        known = f"{interval.low_us / 1e3:.3f} to {interval.high_us / 1e3:.3f} ms by {by}, because figures are missing"
    known += "; from a synthetic cost table, in which any figure may be off" * table.metadata.synthetic
    lines.append(limit_text(limit_of(result.busy_us, result.iteration_time_us)))
    holds = max(host_bytes_of_nodes(given, work)) if given is not None else stock_bytes(work)[1]
    runs = [ComparedRun("this schedule" if given is not None else by, result.iteration_time_us, holds)]
    without = without_plan(work, table, extrapolate=extrapolate)
    runs += [without] if without is not None and without.by != by else []
    add = training_by(schedule_path, given) if given is not None and by_time(runs[::-1])[0] is runs[0] else ""
    lines += last_lines(f"an iteration takes {known}", runs, add=add)
    emit(as_json, figures, "\n".join(lines))
