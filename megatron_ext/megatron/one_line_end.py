"""How a training process ends: bad input by one line and exit code 2, a lost peer by an exit code of its own."""

import os
import sys
import time
from typing import NoReturn

from megatron_ext.formats.errors import InputError
from megatron_ext.runtime.watch import exit_code, lost_peer
from megatron_ext.runtime.worker import begin_exit

OTHER_RANKS_SECONDS = 2.0
"""How long ranks but the first wait before they say what is wrong: the first mostly says the same, and the launcher
then ends the others."""


def install() -> None:
    """Let an InputError that nobody catches end the process by :func:`end`, and the loss of a peer, once it is
    reported, by its exit code. Other errors are reported as before."""
    report = sys.excepthook

    def report_unless_input(kind, error, traceback):
        if isinstance(error, InputError):
            end(error)
        report(kind, error, traceback)
        if lost_peer(error):
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(exit_code(error))

    sys.excepthook = report_unless_input


def end(error: InputError) -> NoReturn:
    """Say what is wrong and leave; threads of collectives may still wait for ranks that are gone."""
    begin_exit()  # or a thread that waits for the first rank would call it lost
    if int(os.environ.get("RANK", 0)) > 0:
        time.sleep(OTHER_RANKS_SECONDS)
    sys.stdout.flush()
    # torch holds sys.stderr back while it reports an uncaught error, to write the rank before every line.
    print(f"megatron-ext: {error}", file=sys.__stderr__, flush=True)
    os._exit(2)
