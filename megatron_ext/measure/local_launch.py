"""Start one process a rank, show how far they are, and leave nothing behind.

Whatever ends the launcher (Ctrl-C, an error, a kill) ends the ranks: it kills them, and the
kernel does where it cannot. The memory they share is an anonymous file (memfd) without a name
in /dev/shm, gone with its last process.
"""

from __future__ import annotations

import json
import os
import selectors
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable

import msgspec

from megatron_ext.cpubench import allocator
from megatron_ext.formats.errors import InputError
from megatron_ext.launch import launcher
from megatron_ext.measure.fabric import shared_bytes
from megatron_ext.measure.options import Options
from megatron_ext.runtime import shared_block


class RankFailed(RuntimeError):
    """A rank ended before it had measured everything."""


def run(options: Options, progress: Callable[[int, int, str], None] = lambda done, total, what: None) -> dict:
    """Measure on all ranks of ``options`` and return what rank 0 collected.

    Raises:
        InputError: a rank found that the input is bad (for example ``--modules``).
        RankFailed: a rank was killed or failed; the end of its error output is in the message.
    """
    options.check()
    ranks = _Ranks(options)
    try:
        return ranks.collect(progress)
    finally:
        ranks.close()


class _Ranks:
    def __init__(self, options: Options):
        self.options = options
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
        self.pipes.append(os.fdopen(reading, "r"))
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
            OMP_NUM_THREADS=str(self.options.threads),
            MKL_NUM_THREADS=str(self.options.threads),
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
        """Read all pipes until every rank has ended well."""
        result = None
        with selectors.DefaultSelector() as selector:
            for rank, pipe in enumerate(self.pipes):
                selector.register(pipe, selectors.EVENT_READ, (rank, pipe))
            while selector.get_map():
                for key, _ in selector.select():
                    rank, pipe = key.data
                    line = pipe.readline()
                    if not line:
                        selector.unregister(pipe)
                        self._ended(rank)
                        continue
                    message = json.loads(line)
                    if "input_error" in message:
                        raise _Worded(message["input_error"])
                    if message.get("result") is not None:
                        result = message["result"]
                    elif "what" in message:
                        progress(message["done"], message["total"], message["what"])
        if result is None:
            raise RankFailed("rank 0 ended without a result")
        return result

    def _ended(self, rank: int) -> None:
        code = self.processes[rank].wait()
        if code != 0:
            self.errors[rank].seek(0)
            tail = self.errors[rank].read()[-2000:].strip()
            how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
            raise RankFailed(f"rank {rank} of the measurement {how}{': ' + tail if tail else ''}")

    def close(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()
        for process in self.processes:
            process.wait()
        for file in (*self.pipes, *self.errors):
            file.close()


class _Worded(InputError):
    """An InputError that a rank has already put into words."""

    def __init__(self, text: str):
        super().__init__(text)
