"""How a training process ends after bad input, a failed drive, a kernel fault or a lost peer: each with one line and an
exit code of its own."""

import os
import sys
import time
import traceback
from typing import NoReturn

from megatron_ext.formats.errors import InputError
from megatron_ext.runtime import worker
from megatron_ext.runtime.drive import DriveError
from megatron_ext.runtime.watch import exit_code, lost_peer

OTHER_RANKS_SECONDS = 2.0
"""How many seconds all ranks but the first wait before they print the error: usually the first prints the same error,
and the launcher then ends the others."""


def install() -> None:
    """Let an uncaught error whose text is enough end the process through :func:`end`. Other errors are reported as
    before."""
    report = sys.excepthook

    def report_the_others(kind, error, traceback):
        if says_all(error):
            end(error)
        report(kind, error, traceback)

    sys.excepthook = report_the_others


def says_all(error: BaseException) -> bool:
    """Whether the text of ``error`` is enough, without a traceback: for bad input, a failed drive, a kernel fault, or
    another rank that is gone."""
    return isinstance(error, (InputError, DriveError)) or lost_peer(error) or device_fault(error)


def device_fault(error: BaseException) -> bool:
    """Whether a kernel of a scheduled run has failed. From then on every call of the device returns this error, so
    nothing can be closed, and the place where it is raised is not that of the kernel."""
    of_schedule = worker.on_failure is not None
    return of_schedule and isinstance(error, RuntimeError) and str(error).startswith("CUDA error")


def _noticed(error: BaseException) -> str:
    """Where ``error`` was raised: the innermost frame outside torch."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "/torch/" not in frame.filename]
    place = f" in {frames[-1].name} ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"; noticed{place}, but the kernel was launched earlier: set CUDA_LAUNCH_BLOCKING=1 to see where"


def end(error: BaseException) -> NoReturn:
    """Print the error and end the process, even if threads of collectives still wait for ranks that are gone."""
    worker.begin_exit()  # otherwise a thread that waits for the first rank would report it as lost
    rank, (text, *_) = int(os.environ.get("RANK", 0)), str(error).splitlines() or [type(error).__name__]
    if not isinstance(error, InputError):
        text = f"rank {rank}: {'another rank is gone: ' if lost_peer(error) else ''}{text}"
        text += _noticed(error) if device_fault(error) else ""
    elif rank > 0:
        time.sleep(OTHER_RANKS_SECONDS)
    sys.stdout.flush()
    # torch replaces sys.stderr while it reports an uncaught error, to write the rank before every line.
    print(f"megatron-ext: {text}", file=sys.__stderr__, flush=True)
    worker.leave(2 if isinstance(error, InputError) else exit_code(error))
