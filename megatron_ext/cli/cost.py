"""``megatron-ext cost``: read, check, combine, compare and estimate cost tables."""

import json
import os

import click
import msgspec

from megatron_ext.cli import hidden_devices
from megatron_ext.cli.output import emit, fp8_lines, json_option
from megatron_ext.cli.table_check import ALLOW, naming_files
from megatron_ext.cost import (
    combine_tables,
    compare_tables,
    cost_table,
    cost_table_text,
    environment,
    estimated_table,
    hardware_sheet,
)
from megatron_ext.formats import json_files
from megatron_ext.formats.errors import InputError
from megatron_ext.workload import workload


@click.group("cost")
def cost_group() -> None:
    """Read, check, combine, compare and estimate cost tables."""


@cost_group.command("predict")
@click.argument("table_path", metavar="TABLE")
@click.option("--route", required=True, help="A route, or another curve: publish.cpu, p2p, reduce, optimizer.")
@click.option("--bytes", "size_bytes", type=int, required=True, help="Bytes of the whole group.")
@click.option("--busy", multiple=True, help="A link that is busy at the same time (repeatable).")
@click.option("--extrapolate", is_flag=True, help="Allow sizes outside the measured range.")
@json_option
def cost_predict(table_path: str, route: str, size_bytes: int, busy, extrapolate: bool, as_json: bool) -> None:
    """Predict one gather: {us, low_us, high_us}."""
    figures = cost_table_text.predicted(
        cost_table.load(table_path), route, size_bytes, busy=busy, extrapolate=extrapolate, file=table_path
    )
    emit(as_json, figures, cost_table_text.prediction_text(figures))


@cost_group.command("show")
@click.argument("table_path", metavar="TABLE")
@json_option
def cost_show(table_path: str, as_json: bool) -> None:
    """Check a table. Print every curve, how rough it is, and what the table holds for."""
    table = cost_table.load(table_path)
    emit(as_json, cost_table_text.summary(table), cost_table_text.text(table))


@cost_group.command("check")
@click.argument("table_path", metavar="TABLE")
@click.option("--workload", "workload_path", help="A run whose parallel sizes the table should hold for.")
@click.option("--this-machine", is_flag=True, help="Compare hardware and software with this machine's.")
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True)
@click.option("--allow-differences", is_flag=True, help="Only report what differs.")
@json_option
def cost_check(table_path: str, workload_path, this_machine, device: str, allow_differences, as_json: bool) -> None:
    """Refuse a table that was measured on other hardware or software, for other world sizes or another model."""
    table, found = cost_table.load(table_path), []
    if not workload_path and not this_machine:
        raise InputError("nothing to compare with: give --workload or --this-machine", file=table_path)
    if workload_path:
        found = environment.run_differences(table.metadata, workload.load(workload_path))
    if this_machine:
        found += environment.environment_differences(table.metadata, hidden_devices.this_machine(device))
    environment.refuse(found, allow=allow_differences, file=table_path, how=ALLOW)
    emit(as_json, {"differences": found}, "\n".join(found) or "the table holds for this environment")


@cost_group.command("combine")
@click.argument("tables", metavar="[PART=]TABLE...", nargs=-1, required=True)
@click.option("--out", required=True)
@json_option
def cost_combine(tables, out: str, as_json: bool) -> None:
    """Make one table out of several. The first table that has a part gives it, unless PART= names another.

    PART is links, compute or a field: links=cluster.json compute=one_gpu.json
    """
    named = [entry.rpartition("=")[::2] for entry in tables]
    given = {path: cost_table.load(path) for _, path in named}
    table = combine_tables.combine(given, {part: path for part, path in named if part})
    cost_table.save(out, table)
    source = table.metadata.source
    assert source is not None  # combine says where every part is from
    taken = source.parts
    emit(as_json, {"cost_table": out, "parts": taken}, "\n".join(f"{part}: {path}" for part, path in taken.items()))


@cost_group.command("compare")
@click.argument("first_path", metavar="TABLE")
@click.argument("second_path", metavar="OTHER")
@json_option
def cost_compare(first_path: str, second_path: str, as_json: bool) -> None:
    """Say what changed from one table to another, and by how much."""
    changes = compare_tables.compare(cost_table.load(first_path), cost_table.load(second_path))
    emit(as_json, changes, compare_tables.text(changes))


@cost_group.command("calibrate")
@click.argument("run_dir", metavar="RUN_DIR")
@click.option("--cost-table", "table_path", help="The table to correct, in place of the run's own.")
@click.option("--out", help="Where the corrected table is written; by default RUN_DIR/calibrated.cost_table.json.")
@click.option("--extrapolate", is_flag=True, help="Read cost curves outside their measured range.")
@json_option
def cost_calibrate(run_dir: str, table_path: str | None, out: str | None, extrapolate: bool, as_json: bool) -> None:
    """Correct a run's cost table with the run's own figures, so that the next plan is better."""
    from megatron_ext import report as reports
    from megatron_ext.report.calibrate import calibrate, uncorrected

    run = reports.load(run_dir)
    path = out or os.path.join(run_dir, "calibrated.cost_table.json")
    json_files.check_writable(path)
    of_run, workload_path = (os.path.join(run_dir, f"{name}.json") for name in ("cost_table", "workload"))
    with naming_files(table_path or of_run, workload_path):
        table = cost_table.load(table_path) if table_path is not None else None
        found = calibrate(run, table, extrapolate=extrapolate)
    cost_table.save(path, found.table)
    lines = [f"{name} x {factor:.3g}" for name, factor in found.factors.items()]
    lines += uncorrected(found.left, found.unsettled)
    off = f"{found.error_before:+.1%} off, with the corrected table {found.error_after:+.1%}"
    lines.append(f"the prediction of the run's iteration time was {off}; wrote {path}")
    figures = {"cost_table": path, "factors": found.factors, "not_corrected": found.left, "unsettled": found.unsettled}
    emit(as_json, figures | {"error": [found.error_before, found.error_after]}, "\n".join(lines))


@cost_group.command("estimate", context_settings={"ignore_unknown_options": True})
@click.option("--hardware", required=True, help="A machine's name (see: cost hardware), or a data sheet's path.")
@click.option("--workload", "workload_path", required=True, help="What is trained.")
@click.option("--out", required=True, help="Where the cost table is written.")
@click.argument("megatron_options", nargs=-1, type=click.UNPROCESSED)
@json_option
def cost_estimate(hardware: str, workload_path: str, out: str, megatron_options, as_json: bool) -> None:
    """Make a cost table from a machine's data sheet, without measuring.

    Every layer's operations and bytes are counted. MEGATRON_OPTIONS are those of the launch script, or at least
    --seq-length; others say the micro-batch, what is recomputed and whether attention is fused. To replace estimated
    parts by measured ones: cost combine measured.json estimated.json
    """
    from megatron_ext.megatron.ignored_options import batch_of_words

    sheet, work = hardware_sheet.load(hardware), workload.load(workload_path)
    batch = batch_of_words(megatron_options, work.parallel.tensor_model_parallel_size)
    estimated_table.refuse_batch(work, batch, file=workload_path)
    table = estimated_table.estimate(sheet, work, batch, name=hardware)
    cost_table.save(out, table)
    notes = list(table.metadata.notes)
    said = f"wrote {out} (megatron-ext cost show prints every curve)"
    emit(as_json, {"cost_table": out, "notes": notes}, "\n".join([said, *notes, *fp8_lines(megatron_options)]))


@cost_group.command("hardware")
@click.argument("name", required=False)
@click.option("--template", is_flag=True, help="Print a data sheet to fill in, for a machine with NAME's GPU.")
@json_option
def cost_hardware(name: str | None, template: bool, as_json: bool) -> None:
    """List the data sheets of the package; with a NAME or a path, print every figure with its range and source.

    To make a data sheet of your own, run cost hardware NAME --template > FILE and fill in the file.
    """
    if template:
        if name is None:
            raise InputError("needs the NAME of the most similar data sheet; see: cost hardware", field="--template")
        click.echo(json.dumps(hardware_sheet.template(name), indent=1))
        return
    if name is None:
        titles = {known: hardware_sheet.load(known).title for known in hardware_sheet.names()}
        emit(as_json, titles, "\n".join(f"{known:16} {title}" for known, title in titles.items()))
        return
    sheet = hardware_sheet.load(name)
    lines = [
        f"{field:36} {figure.value:<9.4g} {low:.4g} to {high:.4g}  {figure.origin}: {figure.source}"
        for field, figure in hardware_sheet.figures(sheet)
        for low, high in (figure.ends,)
    ]
    emit(as_json, msgspec.to_builtins(sheet), "\n".join([sheet.title, *lines]))
