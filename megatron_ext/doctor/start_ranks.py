"""The doctor's ranks: started here, one per device, or by a launcher that has started this process as one of them."""

import faulthandler
import math
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import NoReturn

import msgspec
from msgspec.structs import replace

from megatron_ext.doctor import finding, stacks
from megatron_ext.doctor.finding import DoctorReport, Finding
from megatron_ext.doctor.place import DoctorOptions
from megatron_ext.formats import json_files
from megatron_ext.formats.errors import InputError, RankFailed, one_line
from megatron_ext.launch import launcher
from megatron_ext.megatron.device_environment import REPEATABLE, SCHEDULED
from megatron_ext.workload.launcher_ranks import ranks_on_this_node

TAIL_CHARACTERS = 3000


def start(options: DoctorOptions, nproc: int, checkout: str | None) -> tuple[DoctorReport, str]:
    """Make all checks on ``nproc`` ranks of this machine, in new processes after some have ended in a check.

    Args:
        checkout: root of a Megatron tree that the ranks import, or None for the one that is installed.

    Returns:
        The report, and the end of what ranks printed if they failed.

    Raises:
        InputError: a rank found that the input is bad.
        RankFailed: there is no report.
    """
    environment = {**_settings(), "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    if checkout is not None:
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [checkout, os.environ.get("PYTHONPATH")]))
    if options.device == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    printed = ""
    Path(options.out).unlink(missing_ok=True)  # the report of another run
    while True:  # ends: every round leaves fewer checks
        with tempfile.TemporaryDirectory(prefix="megatron_ext.") as folder:
            encoded = msgspec.json.encode(replace(options, stacks=folder)).decode()
            command = [sys.executable, "-m", "megatron_ext.doctor.start_ranks", encoded]
            code, said = launcher.launch_quietly(command, nproc, environment=environment)
            tail = said[-TAIL_CHARACTERS:]
            if code == 2:
                raise InputError("a rank refused its input; see its error above")
            if code >= 128:
                raise SystemExit(code)
            printed = tail if code else printed
            if not os.path.exists(options.out):
                raise RankFailed(f"the ranks ended before the first check: {tail}")
            report = json_files.load(options.out, DoctorReport)
            if options.deadline == math.inf:
                options = replace(options, deadline=float(stacks.deadline_path(folder).read_text()))
            found, ended_in, left = finding.left_of(report)
            if options.titles and left == options.titles:  # they did not even reach the first
                ended_in, left = left[0], left[1:]
            if ended_in is not None:
                found += (_ended_in(ended_in, folder, nproc),)
        if time.monotonic() > options.deadline:
            found, left = found + tuple(finding.no_time(title, options.seconds) for title in left), ()
        report = replace(report, findings=found + tuple(finding.not_reached(title) for title in left))
        json_files.save(options.out, report, indent=1)
        if not left:
            return report, printed
        options = replace(options, earlier=found, titles=left)


def _ended_in(title: str, folder: str, nproc: int) -> Finding:
    """The finding of a check in which processes ended."""
    where, whole = stacks.said(folder, nproc)
    found = f"did not end: {where}" if where else "its processes ended"
    return finding.failed(title, one_line(found, 600), "send this report and the ranks' output", whole)


def join(options: DoctorOptions) -> DoctorReport:
    """Run as one of the ranks that a launcher (torchrun, srun) has started. Collective.

    Raises:
        InputError: the launcher does not say how many ranks share a node.
    """
    os.environ |= _settings()
    from megatron_ext.doctor import rank_checks

    world_size = int(os.environ["WORLD_SIZE"])
    per_node = ranks_on_this_node() or world_size
    if world_size % per_node:
        raise InputError("every node must have the same number of ranks", field="LOCAL_WORLD_SIZE", value=per_node)
    kept, nothing = (os.dup(1), os.dup(2)), os.open(os.devnull, os.O_WRONLY)
    _print_to(nothing, nothing)
    try:
        return rank_checks.run(options, per_node, lambda text: _say(kept[1], text))
    finally:
        _print_to(*kept)


def leave(code: int) -> NoReturn:
    """End a rank's process. Destroying process groups in order takes seconds, and they are not needed again; if they
    are left to Python's end, their threads may abort the process."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _settings() -> dict[str, str]:
    """Environment variables of a scheduled run that is compared to the last bit; the user's settings stay."""
    return {name: value for name, value in (SCHEDULED | REPEATABLE).items() if name not in os.environ}


def _print_to(output: int, errors: int) -> None:
    """Redirect what this process prints, including Megatron's and NCCL's lines, to these descriptors."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(output, 1)
    os.dup2(errors, 2)


def _say(descriptor: int, text: str) -> None:
    os.write(descriptor, f"doctor: {text}\n".encode())


def main() -> None:
    """One rank: ``OPTIONS ALOUD``, where ``ALOUD`` is a descriptor; started by :func:`start` only."""
    options, aloud = msgspec.json.decode(sys.argv[1], type=DoctorOptions), int(sys.argv[2])
    early = stacks.path_of(options.stacks, int(os.environ["RANK"])).open("w")
    left = max(options.deadline - time.monotonic(), 1.0)
    faulthandler.dump_traceback_later(min(left, launcher.START_SECONDS), exit=True, file=early)
    from megatron_ext.doctor import rank_checks

    code = 0
    try:
        rank_checks.run(options, int(os.environ["WORLD_SIZE"]), lambda text: _say(aloud, text))
    except InputError as error:
        _say(aloud, str(error))
        code = 2
    leave(code)


if __name__ == "__main__":
    main()
