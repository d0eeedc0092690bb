"""Start one process per rank on this machine, and read rank 0's results.

:mod:`megatron_ext.launch.launcher` starts and ends the ranks. The messages between ranks, and those of rank 0 to this
process, are in files without a name, so nothing of them stays.

[Note: Giving up]
A call of a driver cannot be interrupted. So a measurement that has not ended when its time is up is not waited for. The
ranks write the stacks of their threads to standard error and end (:func:`megatron_ext.measure.rank_program.run`). The
results that rank 0 has sent so far become the table, and the table names what is missing. Starting has its own limits.
"""

import faulthandler
import json
import os
import sys
import tempfile
from collections.abc import Iterable

import msgspec

from megatron_ext.formats.errors import InputError, RankFailed
from megatron_ext.launch import launcher
from megatron_ext.launch.launcher import START_SECONDS, TIME_IS_UP
from megatron_ext.measure import cluster_launch
from megatron_ext.measure.options import Options

SHOWN_CHARACTERS = 4000
"""Characters of the ranks' output that an error shows."""


def run(options: Options) -> dict:
    """Measure on all ranks of ``options`` and return what rank 0 collected.

    Raises:
        InputError: a rank found that the input is bad (for example ``--modules``).
        RankFailed: a rank was killed or failed; the message has the end of the ranks' output. Or there was no result
            when the time was up.
        SystemExit: a signal has ended the measurement.
    """
    options.check()
    threads = str(options.rank_threads)
    environment = {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
    if options.device == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    with tempfile.TemporaryFile("a+b") as told:
        command = [sys.executable, "-m", __name__, msgspec.json.encode(options).decode(), str(told.fileno())]
        how = {"environment": environment, "pass_fds": [told.fileno()]}
        code, said = launcher.launch_quietly(command, options.world_size, **how)
        if code > 128:
            raise SystemExit(code)
        told.seek(0)
        return found(map(json.loads, told), said, options)


def found(messages: Iterable[dict], said: str, options: Options) -> dict:
    """The result among the ranks' messages, or the part of it that there is. Raises the same errors as :func:`run`.

    Args:
        said: the output of all ranks on standard output and standard error.
    """
    known = {name: value for message in messages for name, value in message.items()}
    if "input_error" in known:
        raise InputError(known["input_error"])  # the text of the rank's error
    if "result" in known:
        return known["result"]
    tail = said[-SHOWN_CHARACTERS:].strip()
    if TIME_IS_UP not in said:
        raise RankFailed(f"a rank of the measurement failed: {tail or 'it has printed nothing'}")
    what = known.get("what", "importing PyTorch and connecting the ranks")
    print(f"in {what}:\n{tail}", file=sys.stderr)
    if not known.get("measures"):
        raise RankFailed(f"the ranks have not started: {what} took more than {START_SECONDS:g} s")
    if "so_far" not in known:
        kept = "; the same command continues from the kept results" if options.keep_path else ""
        raise RankFailed(f"not ended in time for --seconds {options.seconds:g}, it was at: {what}{kept}")
    return known["so_far"] | {"given_up": what}


def main() -> None:
    """One rank. Arguments: ``OPTIONS TOLD ALOUD``; the last two are file descriptors. Only :func:`run` starts it."""
    faulthandler.dump_traceback_later(START_SECONDS, file=2, exit=True)
    options, told, aloud = msgspec.json.decode(sys.argv[1], type=Options), *map(int, sys.argv[2:])

    def tell(**message) -> None:
        os.write(told, json.dumps(message).encode() + b"\n")

    try:
        with os.fdopen(aloud, "w") as stream:
            result = cluster_launch.run(options, tell, stream)
    except InputError as error:
        tell(input_error=str(error))
        sys.exit(2)
    if result is not None:
        tell(result=result)
    # Ending the process groups in order would take seconds, and they are not needed again.
    os._exit(0)


if __name__ == "__main__":
    main()
