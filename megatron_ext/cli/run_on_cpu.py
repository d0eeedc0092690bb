"""``megatron-ext run-on-cpu``: train a Megatron checkout on a machine without a GPU."""

import sys
from pathlib import Path

import click

from megatron_ext.formats.errors import InputError


@click.command("run-on-cpu", context_settings={"ignore_unknown_options": True})
@click.option(
    "--nproc",
    type=click.IntRange(1),
    help="Processes on this machine. Default: those of the schedule that is given, or one replica.",
)
@click.argument("script", type=click.Path(dir_okay=False))
@click.argument("script_arguments", nargs=-1, type=click.UNPROCESSED)
def run_on_cpu(nproc: int | None, script: str, script_arguments) -> int:
    """Run SCRIPT, a checkout's pretrain_gpt.py, on the CPU: to try a schedule out, and to check it.

    The checkout may be patched or not. gloo takes NCCL's place and PyTorch's own functions that of fused kernels;
    training is real, its speed says nothing about a GPU. Give --transformer-impl local.
    """
    from megatron_ext.cpubench import launcher
    from megatron_ext.megatron import cpu_options
    from megatron_ext.megatron import script_arguments as arguments
    from megatron_ext.schedule import user_defined_schedule

    path = Path(script).resolve()
    if not path.is_file():
        raise InputError("no such file", field="SCRIPT", value=script)
    given = arguments.read(script_arguments, verb="run-on-cpu")
    cpu_options.refuse_absent_engine(given.transformer_impl)
    if nproc is None and given.schedule is not None:
        nproc = user_defined_schedule.decode(given.schedule).parallel.world_size
    nproc = nproc or given.replica_size
    if nproc % given.replica_size:
        raise InputError(
            f"is no multiple of a replica's {given.replica_size} ranks (pipeline x tensor x context)",
            field="--nproc",
            value=nproc,
        )
    return launcher.launch(
        [sys.executable, "-m", "megatron_ext.megatron.cpu_compat", str(path), *script_arguments],
        nproc,
        environment={"CUDA_VISIBLE_DEVICES": "", "CUDA_DEVICE_MAX_CONNECTIONS": "1"},
    )
