"""``megatron-ext balance``: place layers on pipeline stages by their cost."""

import click

from megatron_ext.cli.output import emit, json_option
from megatron_ext.cli.table_check import naming_files, table_differences


@click.command()
@click.option("--cost-table", required=True, help="Cost table with a compute row for every kind of layer.")
@click.option("--workload", "workload_path", required=True, help="What is trained, with layer_kinds.")
@click.option("--extrapolate", is_flag=True, help="Read cost curves outside their measured range.")
@click.option("--allow-differences", is_flag=True, help="Use a table measured for another model or parallel sizes.")
@json_option
def balance(cost_table: str, workload_path: str, extrapolate: bool, allow_differences: bool, as_json: bool) -> None:
    """Place layers, embedding and output on stages so that the slowest stage is fastest."""
    from megatron_ext.cost import cost_table as cost
    from megatron_ext.planner import stage_balance as balancing
    from megatron_ext.workload import workload

    table, work = cost.load(cost_table), workload.load(workload_path)
    with naming_files(cost_table, workload_path):
        table_differences(table, work, False, allow_differences, file=cost_table)
        found = balancing.balance(work, table, extrapolate=extrapolate)
    before, after = max(found.present_us), max(found.stage_us)
    payload = {"layout": found.layout, "layers": found.counts, "stage_us": found.stage_us}
    payload["slowest_stage_us"] = {"present": before, "balanced": after}
    text = f"slowest stage {before / 1e3:.3f} ms per micro-batch as placed now, {after / 1e3:.3f} ms with this layout"
    emit(as_json, payload, f"--pipeline-model-parallel-layout '{found.layout}'\n{text}")
