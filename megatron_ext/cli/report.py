"""``megatron-ext report``: predicted next to measured."""

import click

from megatron_ext.cli.output import emit, json_option
from megatron_ext.cli.table_check import naming_files
from megatron_ext.formats.errors import InputError


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
        said = _fit_again(run, extrapolate)
    reports.write(built)
    figures, text = reports.report_text.as_json(built), reports.report_text.as_text(built)
    if said is not None:
        figures, text = figures | {"fit": said[0]}, f"{text}\n{said[1]}"
    emit(as_json, figures, "\n".join([text, *reports.report_text.ending(built)]))


def _fit_again(run, extrapolate: bool) -> tuple[dict, str] | None:
    """What a search of settings finds now, as figures and text; None if the run was not prepared by a search."""
    from megatron_ext.report import fit_again

    try:
        again = fit_again.search_again(run, extrapolate=extrapolate)
    except InputError as error:
        return {"refused": str(error)}, f"fit: not searched again: {error}"
    return again and (again.as_json(), again.text())
