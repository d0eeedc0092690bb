"""Start one process a rank on this machine, and read what rank 0 has found.

Ranks are started and ended by :mod:`megatron_ext.launch.launcher`. What they tell each other, and what rank 0 leaves
for whoever has started it, lies in files without a name: nothing of them stays.

[Note: Giving up]
A call of a driver cannot be interrupted. So a measurement that has not ended when its time is up is not waited for:
the ranks write to standard error where they are, and end (:func:`megatron_ext.measure.rank_program.run`). What rank 0
has told of it becomes the table, and the table says what was missed. Starting has limits of its own.
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
"""Of what ranks have said."""


def run(options: Options) -> dict:
    """Measure on all ranks of ``options`` and return what rank 0 collected.

    Raises:
        InputError: a rank found that the input is bad (for example ``--modules``).
        RankFailed: a rank was killed or failed; the end of what the ranks said is in the message. Or nothing had come
            of it when its time was up.
        SystemExit: a signal has ended it.
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
    """The result among what ranks have told, or what there is of it; raises as :func:`run`.

    Args:
        said: what all ranks have written to standard output and standard error.
    """
    known = {name: value for message in messages for name, value in message.items()}
    if "input_error" in known:
        raise InputError(known["input_error"])  # in a rank's words
    if "result" in known:
        return known["result"]
    tail = said[-SHOWN_CHARACTERS:].strip()
    if TIME_IS_UP not in said:
        raise RankFailed(f"a rank of the measurement failed: {tail or 'it has left no word'}")
    what = known.get("what", "importing PyTorch, and meeting")
    print(f"in {what}:\n{tail}", file=sys.stderr)
    if not known.get("measures"):
        raise RankFailed(f"the ranks have not started: {what} takes more than {START_SECONDS:g} s")
    if "so_far" not in known:
        kept = "; the same command goes on from what is kept" if options.keep_path else ""
        raise RankFailed(f"not ended in time for --seconds {options.seconds:g}: {what}{kept}")
    return known["so_far"] | {"given_up": what}


def main() -> None:
    """One rank: ``OPTIONS TOLD ALOUD``, the latter descriptors of files; started by :func:`run` only."""
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
    # Taking process groups down in order takes seconds and nothing of them is needed again.
    os._exit(0)


if __name__ == "__main__":
    main()
