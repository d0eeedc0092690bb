"""``megatron-ext advise``: will a plan help, on a machine that nobody has measured yet?"""

import gc

import click

from megatron_ext.cli.output import emit, json_option
from megatron_ext.cli.script_command import BareScriptCommand
from megatron_ext.formats.errors import InputError


@click.command(cls=BareScriptCommand)
@click.option("--hardware", required=True, help="A machine's name (see: cost hardware), or a data sheet's path.")
@click.option("--nodes", type=click.IntRange(1), default=1, show_default=True)
@click.option("--picture", type=click.Path(), help="Write the same as a picture (PNG).")
@click.argument("megatron_options", nargs=-1, type=click.UNPROCESSED)
@json_option
def advise(hardware: str, nodes: int, picture: str | None, megatron_options, as_json: bool) -> None:
    """Say from Megatron's model options and a machine's name whether a plan will help.

    MEGATRON_OPTIONS (after --) are those of describe. Needs neither torch nor Megatron nor a GPU; nothing is measured.
    """
    from megatron_ext.cost import hardware_sheet
    from megatron_ext.formats import json_files
    from megatron_ext.megatron import gpt_arguments
    from megatron_ext.megatron.ignored_options import parse
    from megatron_ext.megatron.optimizer_of_args import optimizer_settings
    from megatron_ext.planner import advice, advice_text

    gc.disable()  # a run of a second that makes many small objects and keeps most of them
    sheet = hardware_sheet.load(hardware)
    if picture:
        json_files.check_writable(picture)
    passed_over: list[str] = []
    try:
        args = parse(
            megatron_options,
            verb="advise",
            passed_over=passed_over,
            world_size=nodes * sheet.gpus_per_node,
            transformer_impl="transformer_engine",  # Megatron's own default
            gpus_per_node=sheet.gpus_per_node,
        )
    except InputError as error:
        if error.field != "WORLD_SIZE":
            raise
        # There are no processes: the user gives nodes.
        gpus = f"gives {nodes * sheet.gpus_per_node} GPUs; the parallel sizes"
        reason = error.message.replace("processes", "GPUs").replace("is no multiple", "need a multiple")
        raise InputError(f"{gpus} {reason}", field="--nodes", value=nodes) from None
    if passed_over:
        click.echo(f"advise: not known here and passed over: {', '.join(passed_over)}", err=True)
    setting = advice.Setting(
        gpt_arguments.shape_of(args),
        gpt_arguments.parallel_of(args),
        gpt_arguments.batch_of(args),
        args.zero_stage,
        gpt_arguments.limits_of(args),
        optimizer_settings(args),
    )
    found = advice.advise(setting, sheet)
    if picture:
        from megatron_ext.report import advice_picture

        advice_picture.save(found, picture)
    emit(as_json, advice_text.as_json(found), advice_text.as_text(found))
