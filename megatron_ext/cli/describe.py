"""``megatron-ext describe``: the workload of a real model."""

import os

import click
from msgspec import structs, to_builtins

from megatron_ext.cli.output import emit, fp8_lines, json_option, say_taken
from megatron_ext.cli.script_command import BareScriptCommand, entry_option
from megatron_ext.formats import json_files, rank_memory
from megatron_ext.formats.errors import InputError
from megatron_ext.formats.rank_memory import RankMemory
from megatron_ext.workload.workload import Workload


@click.command(cls=BareScriptCommand)
@click.option("--out", required=True, help="Where the workload is written.")
@click.option(
    "--checkout",
    envvar="MEGATRON_PATH",
    help="A Megatron-LM checkout: its own pretrain_gpt.py reads the options and builds the model.",
)
@entry_option
@click.argument("megatron_options", nargs=-1, type=click.UNPROCESSED)
@json_option
def describe(out: str, checkout: str | None, entry: str | None, megatron_options, as_json: bool) -> None:
    """Write the workload of a real model, from Megatron's own options.

    With a checkout, give all options that your script gives to pretrain_gpt.py (or --entry), and --data-parallel-size.
    Without a checkout, a subset of Megatron's options is known. Options that do not change the workload are ignored.
    """
    import warnings

    from megatron_ext.workload import workload
    from megatron_ext.workload import workload_text as showing

    model, taken = None, {}
    warnings.simplefilter("ignore")  # Megatron warns of packages that only training needs, torch of its old functions
    json_files.check_writable(out)
    if checkout:
        from megatron_ext.cli.checkout_model import refuse_script
        from megatron_ext.megatron import describe_from_checkout, script_arguments

        describe_from_checkout.require_script(checkout, entry)
        script = script_arguments.read(megatron_options)
        refuse_script(script, "describe")
        if script.ours.data_parallel_size is None and "WORLD_SIZE" not in os.environ:
            taken["--data-parallel-size"] = 1
        model = describe_from_checkout.describe_command_line(checkout, megatron_options, entry)
        described = model.workload
    elif entry:
        raise InputError("needs --checkout: the Megatron that it trains with", field="--entry", value=entry)
    else:
        described, taken = _of_known_options(megatron_options)
    if described.parallel.gpus_per_node is None and described.parallel.world_size > 1:
        taken["--gpus-per-node"] = described.parallel.world_size
    say_taken("describe", taken)
    workload.save(out, described)
    memory = _stock_memory(described)
    held_by = (f"rank {rank}, as stock Megatron holds it: {rank_memory.text(held)}" for rank, held in enumerate(memory))
    lines = [showing.text(described, out), *(f"memory {held}" for held in held_by)]
    if missing := showing.not_counted(described):
        lines.append(f"{missing}: this model cannot run without data here{who_counts(model)}")
    lines += fp8_lines(megatron_options)
    most = max(held.device_total_bytes for held in memory) / 2**30
    lines.append(f"verdict: stock Megatron holds {most:.2f} GiB on the device of the rank that holds most")
    emit(as_json, {"workload": out, **showing.summary(described), "memory": to_builtins(memory)}, "\n".join(lines))


def _of_known_options(megatron_options) -> tuple[Workload, dict]:
    """The workload, and the values that were taken for options that are not given."""
    from megatron_ext.megatron import cpu_compat, engine_modules, ignored_options, script_arguments

    given = script_arguments.read(megatron_options).transformer_impl
    layers = given or ignored_options.MEGATRONS["--transformer-impl"]
    try:
        if layers == "transformer_engine":
            engine_modules.install()
        cpu_compat.install(even_with_a_device=True)  # a model without data is not put onto a device
        from megatron_ext.megatron import describe_model

        described = describe_model.describe_options(ignored_options.parse(megatron_options, transformer_impl=layers))
    except ModuleNotFoundError as error:
        why = f"there is no package {error.name} here: give --checkout, or run in an environment with megatron-core"
        raise InputError(why) from None
    return described, ignored_options.sizes_taken(megatron_options) | ignored_options.not_given(megatron_options)


def who_counts(model) -> str:
    """Text that says how activations can be counted: by ``measure``, unless it refuses to time the layers of a
    checkout's ``model``."""
    if model is not None:
        from megatron_ext.megatron.layer_options import require_known_layers

        try:
            require_known_layers(model.layer_options, model.workload)
        except InputError as error:
            return f", and `measure` refuses it ({error}); leave room for them in --limit-device-bytes"
    return "; `measure` counts them"


def _stock_memory(described: Workload) -> list[RankMemory]:
    """What every pipeline rank holds at its peak by stock Megatron's rule. Limits are ignored."""
    from megatron_ext.planner.stock import stock_schedule
    from megatron_ext.schedule.memory_bill import memory_bill
    from megatron_ext.workload.workload import Limits

    unlimited = structs.replace(described, limits=Limits())
    return [bill.memory for bill in memory_bill(stock_schedule(unlimited), unlimited)]
