"""``megatron-ext measure``: make a cost table by measuring, or from another tool's log."""

import os

import click
from msgspec.structs import replace

from megatron_ext.cli.checkout_model import (
    LAYER_RUNNERS,
    checkout_option,
    for_workload,
    given_on_the_command_line,
    of_experts,
    refuse_early,
    refuse_script,
    use_megatron_of,
    with_sizes,
)
from megatron_ext.cli.output import emit, json_option
from megatron_ext.cli.script_command import ScriptCommand, entry_option
from megatron_ext.formats.errors import InputError, flag
from megatron_ext.measure.options import LINKS, Options

READ_BY = {"nccl-tests": ("collective",), "curves": ("system",), "nvbandwidth": ()}
"""Options of ``measure`` that each format of ``--import`` reads; measuring itself reads none of them."""
OF_IMPORTS = ("system", "collective")
"""All options that only imports read."""
SIXTEEN_BITS = {"--bf16", "--fp16"}
"""Options of a training script that give its parameters 16 bits; without them they have 32."""


def refuse_unread(imported: str | None) -> None:
    """Refuse an option that would be ignored. Raises an InputError that names it."""
    names = {p.name: p.opts[0] for p in click.get_current_context().command.params}
    unread = OF_IMPORTS if imported is None else ()
    if imported in READ_BY:
        unread = {*names} - {"out", "imported", "as_json", *READ_BY[imported]}
    for name in given_on_the_command_line(*(name for name in names if name in unread)):
        how = f"is not read with --import {imported}" if imported else "is read only with --import"
        raise InputError(how, field=names[name] if names[name].startswith("-") else name.upper())


def _script_of(options, checkout: str | None, entry: str | None):
    """The script's arguments, or None; refused if their text shows that something is wrong."""
    if entry is not None and not checkout:
        raise InputError("needs --checkout: the Megatron that it trains with", field="--entry", value=entry)
    if not options.module_args:
        if checkout:
            raise InputError("needs the script's arguments after --", field="--checkout", value=checkout)
        return None
    from megatron_ext.megatron import script_arguments

    of_megatron = options.modules in (None, LAYER_RUNNERS) or bool(checkout)
    script = script_arguments.read(options.module_args, verb="measure", of_megatron=of_megatron)
    refuse_early(script, options)
    return script


def _of_script(options, script, checkout: str | None, entry: str | None):
    """``options`` with the sizes that the script's arguments give, and the layers that they build."""
    if script is None:
        return options
    from megatron_ext.megatron import ignored_options
    from megatron_ext.megatron.gpt_arguments import parallel_of

    if options.modules in (None, LAYER_RUNNERS) or checkout:
        use_megatron_of(checkout, entry)
    if not checkout:
        host = options.optimizer_on_host or "--optimizer-cpu-offload" in script.megatron
        own = {"optimizer_on_host": host, "parameter_bytes": 4 if SIXTEEN_BITS.isdisjoint(script.megatron) else 2}
        options = with_sizes(replace(options, modules=options.modules or LAYER_RUNNERS, **own), script)
        if script.sizes.num_experts is None:
            return options
        args = ignored_options.parse(script.megatron, verb="measure", data_parallel_size=options.ranks_of_stage)
        return replace(options, expert_data_parallel_size=of_experts(parallel_of(args)))
    refuse_script(script, "measure")
    from megatron_ext.megatron.describe_from_checkout import describe_command_line

    arguments = list(options.module_args)
    if script.ours.data_parallel_size is None and "WORLD_SIZE" not in os.environ:
        arguments += ["--data-parallel-size", str(options.data_parallel_size)]
    return for_workload(with_sizes(options, script), describe_command_line(checkout, arguments, entry))


def option(name: str, *short: str, help: str | None = None):
    """The command-line option for a number in :class:`Options`, with the default from there."""
    default = getattr(Options(), name)
    number = float if isinstance(default, float) else int
    return click.option(flag(name), *short, type=number, default=default, show_default=default is not None, help=help)


@click.command(cls=ScriptCommand)
@click.option("--out", required=True, help="Where the cost table is written.")
@click.option(
    "--import",
    "imported",
    nargs=2,
    metavar="FORMAT LOG",
    help="Read another tool's log instead of measuring: nccl-tests, nvbandwidth, curves.",
)
@click.option("--system", help="With --import curves: which of the file's systems.")
@click.option("--collective", help="With --import nccl-tests: what was measured, if the log does not say.")
@option("data_parallel_size", "--dp")
@option("pipeline_model_parallel_size", "--pp")
@option("tensor_model_parallel_size", "--tp")
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True)
@option("min_bytes", help="Smallest whole group.")
@option("max_bytes", help="Largest whole group.")
@click.option("--also-sizes", help="Further sizes of gathers in bytes, separated by commas: a schedule's groups.")
@option("max_rank_bytes", help="Whole parameters of one rank, for the optimizer step.")
@option("seconds", help="Time for measuring; the time to start the ranks is extra.")
@option("threads", help="CPU threads per rank; default: on a GPU as many as a run uses, else one.")
@option("hidden_size", help="Shape of the matrix products that stand for compute.")
@option("seq_length")
@option("micro_batch_size")
@click.option("--links", metavar="NAMES", help="What is measured, separated by commas: gpu, cpu, publish, compute, ...")
@click.option("--modules", help=f"MODULE:FUNCTION or FILE:FUNCTION, such as {LAYER_RUNNERS}; its arguments follow --.")
@click.option("--optimizer-on-host", is_flag=True, help="The optimizer steps on the host: --optimizer-cpu-offload.")
@click.option("--nvme-path", type=click.Path(), help="Directory on the drive; without it there is no nvme route.")
@checkout_option
@entry_option
@click.argument("module_args", nargs=-1, type=click.UNPROCESSED)
@json_option
def measure(out: str, imported, links, also_sizes, checkout, entry, as_json: bool, **options) -> None:
    """Measure links, contention and compute, and write a cost table.

    MODULE_ARGS (after --) are the arguments of a training script. Sizes are read from them, and the layers are the
    checkout's. With --modules they are passed to the function that it names.
    """
    from megatron_ext.cost import cost_table as cost
    from megatron_ext.formats import json_files
    from megatron_ext.measure import cluster_launch, kept_measurement

    refuse_unread(imported[0] if imported else None)
    of_import = {name: options.pop(name) for name in OF_IMPORTS}
    if imported:
        from megatron_ext.cost import importers

        table = importers.read(*imported, **{name: of_import[name] for name in READ_BY.get(imported[0], ())})
    else:
        from megatron_ext.measure import measure as run
        from megatron_ext.measure.size_grid import announcement
        from megatron_ext.runtime.drive import refuse_no_drive

        if also_sizes:
            options["also_sizes"] = Options.parse_sizes(also_sizes)
        chosen, first = tuple(links.split(",")) if links else LINKS, os.environ.get("RANK", "0") == "0"
        asked = Options(links=chosen, keep_path=kept_measurement.path_of(out), **options)
        script = _script_of(asked, checkout, entry)
        asked = cluster_launch.with_nodes(asked) if script is None else asked
        with cluster_launch.ends_all():
            if asked.nvme_path is not None:
                refuse_no_drive(asked.nvme_path, "--nvme-path", memory=True)
            if first:
                json_files.check_writable(out)
            wanted = _of_script(asked, script, checkout, entry).check(chosen=bool(links))
            if first:
                click.echo(announcement(wanted), err=True)
            table = run(wanted)
        if table is None:  # under a launcher, and not rank 0
            return
    cost.save(out, table)
    kept_measurement.remove(out)
    notes = list(table.metadata.notes)
    emit(as_json, {"cost_table": out, "notes": notes}, "\n".join([f"wrote {out}", *notes]))
