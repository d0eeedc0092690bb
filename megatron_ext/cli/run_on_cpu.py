"""``megatron-ext run-on-cpu``: train a Megatron checkout on a machine without a GPU."""

import os
import sys
from pathlib import Path

import click

from megatron_ext.formats.errors import InputError, flag, option_error


@click.command("run-on-cpu", context_settings={"ignore_unknown_options": True})
@click.option(
    "--nproc",
    type=click.IntRange(1),
    help="Number of processes on this machine. Default: that of the given schedule, or of one replica.",
)
@click.option("--checkout", help="The Megatron-LM checkout that SCRIPT trains with; by default the directory it is in.")
@click.argument("script", type=click.Path(dir_okay=False))
@click.argument("script_arguments", nargs=-1, type=click.UNPROCESSED)
def run_on_cpu(nproc: int | None, checkout: str | None, script: str, script_arguments) -> int:
    """Run SCRIPT, a checkout's pretrain_gpt.py or another, on the CPU, to try or check a schedule.

    The checkout may be patched or not. gloo replaces NCCL, and PyTorch's own functions replace fused kernels. Training
    is real, but its speed says nothing about a GPU. Give --transformer-impl local.
    """
    from megatron_ext.launch import launcher
    from megatron_ext.megatron import script_arguments as arguments

    path = Path(script).resolve()
    if not os.path.isfile(path):
        raise InputError("no such file", field="SCRIPT", value=script)
    given = arguments.read(script_arguments, verb="run-on-cpu")
    arguments.refuse_none(given)
    arguments.refuse_absent_engine(given.transformer_impl)
    check = given.ours.user_defined_schedule_check
    if check is not None and given.schedule is None:
        raise InputError("needs --user-defined-schedule", field="--user-defined-schedule-check", value=check)
    nproc = (nproc or given.replica_size) if given.schedule is None else _ranks_of_schedule(given, nproc)
    if nproc % given.replica_size:
        why = f"is not a multiple of a replica's {given.replica_size} ranks (pipeline x tensor x context)"
        raise option_error("nproc", why, nproc)
    tree = path.parent if checkout is None else Path(checkout).resolve()
    if given.schedule is not None:
        from megatron_ext.checkout import check

        if check(tree).state == "clean":
            raise InputError(f"has no hooks yet; run `megatron-ext patch apply {tree}`", file=tree)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(tree), os.environ.get("PYTHONPATH")]))
    os.environ.update({"CUDA_VISIBLE_DEVICES": "", "CUDA_DEVICE_MAX_CONNECTIONS": "1"})
    command = [str(path), *script_arguments]
    if nproc > 1 and _import_once(command):
        return launcher.launch(command, nproc, fork=True)
    return launcher.launch([sys.executable, "-m", "megatron_ext.megatron.cpu_compat", *command], nproc)


def _import_once(command: list[str]) -> bool:
    """Import what the script imports, so that ranks can be forks of this process. False if they cannot be."""
    from megatron_ext.cpubench import allocator, forked_rank

    forked_rank.restart_with({**allocator.rank_variables(), "OMP_NUM_THREADS": "1"})
    # The Megatron that the compatibility module changes. A process that was just restarted has it on its path already.
    sys.path[:0] = [os.path.dirname(command[0]), os.environ["PYTHONPATH"].partition(os.pathsep)[0]]
    from megatron_ext.cpubench import parser_options
    from megatron_ext.megatron import cpu_compat

    if cpu_compat.install():
        parser_options.without_a_gpu()
    return forked_rank.import_script(command[0])


def _ranks_of_schedule(given, nproc: int | None) -> int:
    """Number of ranks of the schedule in the script arguments ``given``. Refuses arguments that do not agree with the
    schedule: Megatron would end with an error about sizes that do not divide."""
    from megatron_ext.schedule import user_defined_schedule

    parallel = user_defined_schedule.read_unchecked(given.schedule).parallel
    default = None if "--use-mp-args-from-checkpoint-args" in given.megatron else 1
    for name in ("pipeline_model_parallel_size", "tensor_model_parallel_size"):
        if (said := getattr(given.sizes, name) or default) not in (None, size := getattr(parallel, name)):
            why = f"the script's arguments say {said} ({flag(name)})"
            raise InputError(why, file=given.schedule, field=f"parallel.{name}", value=size)
    if nproc not in (None, parallel.world_size):
        raise option_error("nproc", f"the schedule is for {parallel.world_size} ranks", nproc)
    return parallel.world_size
