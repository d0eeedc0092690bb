"""``megatron-ext report``: predicted beside measured."""

import click

from megatron_ext.cli.output import emit, json_option
from megatron_ext.cli.table_check import naming_files


@click.command()
@click.argument("run_dir", metavar="RUN_DIR")
@click.option("--extrapolate", is_flag=True, help="Read cost curves outside their measured range.")
@json_option
def report(run_dir: str, extrapolate: bool, as_json: bool) -> None:
    """Compare a scheduled run with stock Megatron and with its prediction; draw a timeline."""
    from megatron_ext import report as reports

    run = reports.load(run_dir)
    with naming_files(str(run.file("cost_table")), str(run.file("workload"))):
        built = reports.build(run, extrapolate=extrapolate)
    reports.write(built)
    emit(as_json, reports.report_text.as_json(built), reports.report_text.as_text(built))
