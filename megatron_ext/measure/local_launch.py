"""Start one process a rank, show how far they are, and leave nothing behind.

Whatever ends the launcher (Ctrl-C, an error, a kill) ends the ranks: it kills them, and the
kernel does where it cannot. The memory they share is an anonymous file (memfd) without a name
in /dev/shm, gone with its last process.

[Note: Giving up]
A call of a driver cannot be interrupted. So a measurement that has not ended when its time is up is not waited for:
what rank 0 has sent of it becomes the table, and the table says what was missed. Where the ranks were they write to
standard error by themselves (:func:`megatron_ext.measure.rank_program.run`), which is shown.
"""

import contextlib
import json
import math
import os
import selectors
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from time import monotonic

import msgspec

from megatron_ext.cpubench import allocator
from megatron_ext.formats.errors import InputError
from megatron_ext.launch import launcher
from megatron_ext.measure.fabric import shared_bytes
from megatron_ext.measure.options import MOST_OVER, Options
from megatron_ext.runtime import shared_block

GRACE_SECONDS = 1.0
"""Behind the end of the time, before it is given up: the ranks say where they are meanwhile."""

LOOK_SECONDS, LEAVE_SECONDS = 0.5, 10.0
"""Between two looks at the clock, and how long the end of the ranks is waited for: freeing page-locked memory takes the
kernel seconds, and the table is there."""

SHOWN_CHARACTERS, PIPE_BYTES = 4000, 1 << 16
"""Of what a rank has said, and read of a pipe at once."""


class RankFailed(RuntimeError):
    """A rank ended before it had measured everything."""


def run(options: Options, progress: Callable[[int, int, str], None] = lambda done, total, what: None) -> dict:
    """Measure on all ranks of ``options`` and return what rank 0 collected.

    Raises:
        InputError: a rank found that the input is bad (for example ``--modules``).
        RankFailed: a rank was killed or failed; the end of its error output is in the message. Or nothing had come
            of it when its time was up.
    """
    options.check()
    ranks = Ranks(options)
    try:
        result = ranks.collect(progress)
        progress(*ranks.done, "ending the ranks")
        return result
    finally:
        ranks.close()


class Ranks:
    """The processes of all ranks, from their start on."""

    def __init__(self, options: Options):
        self.options, self.done, self.what = options, (0, 0), "starting"
        self.processes: list[subprocess.Popen] = []
        self.errors = []
        self.pipes = []
        block = shared_block.create(shared_bytes(options))
        listener = socket.socket()
        try:
            listener.bind(("127.0.0.1", 0))
            listener.listen()
            for rank in range(options.world_size):
                self._start(rank, block, listener)
        except BaseException:
            self.close()
            raise
        finally:
            os.close(block)
            listener.close()

    def _start(self, rank: int, block: int, listener: socket.socket) -> None:
        reading, writing = os.pipe()
        self.pipes.append(os.fdopen(reading, "rb", buffering=0))
        errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed by close(); no name: nothing to clean up
        self.errors.append(errors)
        setup = {
            "options": msgspec.to_builtins(self.options),
            "rank": rank,
            "parent": os.getpid(),
            "port": listener.getsockname()[1],
            "block": block,
            "pipe": writing,
        }
        descriptors = [block, writing]
        if rank == 0:
            setup["listener"] = listener.fileno()
            descriptors.append(listener.fileno())
        environment = dict(
            allocator.environment(self.options.device) | launcher.LOOPBACK | os.environ,
            OMP_NUM_THREADS=str(self.options.rank_threads),
            MKL_NUM_THREADS=str(self.options.rank_threads),
        )
        command = [sys.executable, "-m", "megatron_ext.measure.rank_process", json.dumps(setup)]
        try:
            self.processes.append(
                subprocess.Popen(
                    command,
                    pass_fds=descriptors,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=errors,
                    stderr=errors,
                )
            )
        finally:
            os.close(writing)

    def collect(self, progress) -> dict:
        """Read all pipes until rank 0 has sent its result, which it does behind the last barrier, or time is up."""
        so_far, deadline, rests = None, math.inf, [b""] * len(self.pipes)
        with selectors.DefaultSelector() as selector:
            for rank, pipe in enumerate(self.pipes):
                selector.register(pipe, selectors.EVENT_READ, rank)
            while selector.get_map():
                for key, _ in selector.select(LOOK_SECONDS):
                    rank = key.data
                    found = self.pipes[rank].read(PIPE_BYTES)
                    if not found:
                        selector.unregister(self.pipes[rank])
                        self._ended(rank)
                    *lines, rests[rank] = (rests[rank] + found).split(b"\n")
                    for message in map(json.loads, lines):
                        if "input_error" in message:
                            raise InputError(message["input_error"])  # in a rank's words
                        if message.get("result") is not None:
                            return message["result"]
                        so_far = message.get("so_far", so_far)
                        if "what" in message:
                            self.done, self.what = (message["done"], message["total"]), message["what"]
                            progress(*self.done, self.what)
                if deadline == math.inf and self.done[0]:
                    deadline = monotonic() + MOST_OVER * self.options.seconds + GRACE_SECONDS
                if monotonic() > deadline:
                    return self._give_up(so_far)
        raise RankFailed("rank 0 ended without a result")

    def _give_up(self, so_far: dict | None) -> dict:
        """See [Note: Giving up]."""
        for rank in range(len(self.processes)):
            print(f"rank {rank}, in {self.what}:\n{self._said(rank)}", file=sys.stderr)
        if so_far is None:
            kept = "; the same command goes on from what is kept" if self.options.keep_path else ""
            raise RankFailed(f"not ended in {MOST_OVER} times --seconds {self.options.seconds:g}: {self.what}{kept}")
        return so_far | {"given_up": self.what}

    def _said(self, rank: int) -> str:
        self.errors[rank].seek(0)
        return self.errors[rank].read()[-SHOWN_CHARACTERS:].strip()

    def _ended(self, rank: int) -> None:
        code = self.processes[rank].wait()
        if code != 0:
            tail = self._said(rank)
            how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
            raise RankFailed(f"rank {rank} of the measurement {how}{': ' + tail if tail else ''}")

    def close(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            for process in self.processes:
                process.wait(LEAVE_SECONDS)
        for file in (*self.pipes, *self.errors):
            file.close()
