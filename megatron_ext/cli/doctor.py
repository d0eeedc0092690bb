"""``megatron-ext doctor``: check whether this machine can train by a schedule, and say what to do if it cannot."""

import os
import sys
from pathlib import Path
from typing import Literal

import click
import msgspec

from megatron_ext.cli.output import emit, json_option
from megatron_ext.formats.errors import InputError
from megatron_ext.measure.options import Options


@click.command()
@click.option("--out", default="doctor_report.json", show_default=True, help="Where the report is written.")
@click.option("--schedule", "schedule_path", help="A schedule: this node's limits are compared with what it needs.")
@click.option("--nvme", help="A directory on a drive, in which direct reads and route nvme are tried.")
@click.option("--checkout", help="A patched Megatron-LM checkout to train with. Default: the installed Megatron.")
@click.option("--nproc", type=click.IntRange(1, 64), help="Ranks to start here. Default: one per GPU, or 2 on the CPU.")
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True)
@click.option(
    "--check-seconds", type=click.FloatRange(1), default=30.0, show_default=True, help="Longest time for one check."
)
@click.option("--seconds", type=click.FloatRange(1), default=120.0, show_default=True, help="The same for all checks.")
@json_option
def doctor(out, schedule_path, nvme, checkout, nproc, device, as_json: bool, **times) -> int:
    """Check this machine in about two minutes: versions, limits, pinning, streams, overlap, drives, and training.

    On one node, start it without a launcher. On several nodes, start it with torchrun or srun on all ranks. The exit
    code is 0 if no check failed and 1 if one did. The report can be attached to an issue.
    """
    from megatron_ext.doctor import finding, start_ranks
    from megatron_ext.doctor.place import DoctorOptions
    from megatron_ext.formats import json_files
    from megatron_ext.measure.cluster_launch import ends_all, is_launched
    from megatron_ext.schedule import footprint, validate

    launched, printed = is_launched(), ""
    if launched and nproc is not None:
        raise InputError("a launcher has already started the ranks; leave it out", field="--nproc", value=nproc)
    with ends_all():
        if nvme is not None and not os.path.isdir(nvme):
            raise InputError("is not a directory", field="--nvme", value=nvme)
        nvme = nvme and str(Path(nvme).resolve())
        if checkout is not None:
            if not os.path.isdir(Path(checkout, "megatron", "core")):
                raise InputError("does not contain megatron/core", field="--checkout", value=checkout)
            checkout = str(Path(checkout).resolve())
        need = None if schedule_path is None else max(footprint.pinned_host_bytes(validate.load(schedule_path)))
        options = DoctorOptions(out=str(Path(out).resolve()), device=device, need_bytes=need, nvme=nvme, **times)
        devices, first = _devices(device), not launched or os.environ["RANK"] == "0"
        if first:
            json_files.check_writable(out)
        if launched:
            sys.path[:0] = filter(None, [checkout])
            report = start_ranks.join(options)
        else:
            report, printed = start_ranks.start(options, nproc or devices, checkout)
    if not first:
        start_ranks.leave(int(report.failed))
    if printed:
        click.echo(printed, err=True)
    payload = {"report": out, "failed": report.failed, "findings": msgspec.to_builtins(report.findings)}
    emit(as_json, payload, f"{finding.text(report)}\nwrote {out}")
    if launched:
        start_ranks.leave(int(report.failed))
    return int(report.failed)


def _devices(device: Literal["auto", "cpu", "cuda"]) -> int:
    """Ranks to start: one per GPU, or 2 on the CPU. Raises InputError if CUDA is asked for and absent."""
    import torch

    return torch.cuda.device_count() if Options(device=device).uses_cuda() else 2
