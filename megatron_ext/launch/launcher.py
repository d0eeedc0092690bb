"""Start the processes of a run on this machine and make sure that none of them outlives the run.

    python -m megatron_ext.launch.launcher --nproc-per-node 4 [-m | --fork] SCRIPT_OR_MODULE [ARGUMENTS]

sets the environment that torchrun sets. It differs from torchrun in what the main job needs. A rank's own exit code is
passed on (2 means bad input). When the launcher is killed, its ranks (PR_SET_PDEATHSIG) and the processes that they
have started end too. The launcher names the rank that made the others fail. No port is open to other machines. On
clusters use torchrun or srun.

[Note: One session]
Each rank has a process group of its own and is in the launcher's session. If each had its own session, as under
torchrun, Linux would share processors among sessions (autogroups) instead of among threads. With more ranks than
processors, all of which compute, a transfer then took tens to hundreds of milliseconds longer (measured).
"""

import argparse
import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Collection

from megatron_ext.cpubench import allocator
from megatron_ext.cpubench.forked_rank import ForkedRank, import_script, restart_with
from megatron_ext.formats.end_with_parent import end_with_parent
from megatron_ext.launch import device_sharing

START_SECONDS = 300.0
"""Time limit of each part of the start: importing PyTorch and joining the process group, then each part that a rank
announces. The first use of a device takes 5 to 15 s, making communicators up to 10 s, importing Transformer Engine 20 s
or more."""

TIME_IS_UP = "Timeout ("
"""The text that Python's faulthandler writes before the stacks."""

GRACE_SECONDS = 10
"""How many seconds ranks may take to end after SIGTERM."""

PEER_LOST_CODE = 3
"""Exit code of a rank that ended because another rank was gone: the cause is in the other rank."""

CAUSE_SECONDS = 2.0
"""How long to look for the rank that failed first, after ranks have ended because they lost a peer."""

SETTLE_SECONDS = 0.2
"""How long to wait for other ranks that a failure has ended before one rank is named as the cause. A killed process
closes its connections a moment before it counts as ended, and its peers notice that."""

OUT_OF_MEMORY = ". The kernel does this when the machine or the container runs out of memory"

ADDRESS = "127.0.0.1"

ONE_MACHINE = {
    "MASTER_ADDR": ADDRESS,
    "TORCHELASTIC_USE_AGENT_STORE": "True",  # as under torchrun: no rank makes a store, all are clients
}

LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
"""The interface on which process groups listen, unless the user has set one. By default they take the interface of the
host's name, on which other machines can reach them."""


def _begin(parent: int, to_guard: int) -> None:
    """In the child: lead a process group, see [Note: One session], and be killed when the launcher ends, however it
    ends. ``to_guard`` is the descriptor that only the launcher may keep open."""
    os.close(to_guard)
    os.setpgid(0, 0)
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)  # else a terminal with "stty tostop" stops ranks that write to it
    end_with_parent(parent)


class _Store:
    """The store through which ranks find each other, on the loopback interface only. The stores of torchrun and torch
    listen on all interfaces, and any machine that reaches them may read and write.

    The port is taken before any rank starts and is held, so no other process can listen there.
    """

    def __init__(self) -> None:
        self._listener = socket.socket()
        self._listener.bind((ADDRESS, 0))
        self._listener.listen(1024)
        self.port = self._listener.getsockname()[1]
        self._store = None
        self._thread = threading.Thread(target=self._serve, name="megatron_ext-store", daemon=True)

    def start(self) -> None:
        """Begin to serve, and return at once. Ranks that have connected before are served as well."""
        self._thread.start()

    def _serve(self) -> None:
        with self._listener:  # if there is no store, ranks are refused instead of waiting
            import torch
            from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage] - public by its docs

            self._store = TCPStore(
                ADDRESS,
                self.port,
                is_master=True,
                wait_for_workers=False,
                master_listen_fd=os.dup(self._listener.fileno()),
                use_libuv=torch.__version__ >= "2.7",  # libuv of torch 2.6 does not take a socket
            )

    def close(self) -> None:
        if self._thread.is_alive():  # an import cannot be interrupted
            self._thread.join()
        self._store = None
        self._listener.close()


Rank = subprocess.Popen | ForkedRank

_KILL_GROUPS = 'all=; while read -r one; do all="$all -$one"; done; kill -s KILL -- $all 2>/dev/null'


def _guard() -> tuple[subprocess.Popen, int]:
    """A process that, when the descriptor closes, kills the process groups whose numbers were written to it, unless the
    process is ended before. It is for processes that ranks have started: after a checkpoint Megatron keeps one in each
    rank, which would outlive a killed launcher."""
    numbers, write = os.pipe()
    guard = subprocess.Popen(["/bin/sh", "-c", _KILL_GROUPS], stdin=numbers, start_new_session=True, env={})
    os.close(numbers)
    return guard, write


def launch(
    command: list[str],
    num_processes: int,
    *,
    environment: dict[str, str] | None = None,
    log=None,
    pass_fds: Collection[int] = (),
    fork: bool = False,
) -> int:
    """Run ``command`` once per rank and return 0, or the exit code of the rank that :func:`cause_of` names.

    Args:
        command: program and arguments, the same for every rank; with ``fork`` a script and its arguments.
        num_processes: the number of ranks to start.
        environment: variables in addition to those of this process.
        log: file for the ranks' standard output and error; None inherits. Not with ``fork``.
        pass_fds: further descriptors that the ranks inherit. Not with ``fork``.
        fork: ranks are forks of this process.
    """
    store = _Store()
    shared = {
        **allocator.rank_variables(),
        **LOOPBACK,
        **os.environ,
        **ONE_MACHINE,
        "MASTER_PORT": str(store.port),
        "WORLD_SIZE": str(num_processes),
        "LOCAL_WORLD_SIZE": str(num_processes),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        **(environment or {}),
    }
    sharing = _sharing(num_processes, shared)
    parent, (guard, to_guard) = os.getpid(), _guard()
    ranks: list[Rank] = []
    interrupted: list[int] = []
    previous = {
        number: signal.signal(number, lambda received, frame: interrupted.append(received))
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    }
    try:
        for rank in range(num_processes):
            own = {**device_sharing.settings(rank, sharing), **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            if fork:
                ranks.append(ForkedRank(command[0], command[1:], own, lambda: _begin(parent, to_guard)))
            else:
                files = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log, "pass_fds": pass_fds}
                ranks.append(subprocess.Popen(command, env=own, preexec_fn=lambda: _begin(parent, to_guard), **files))
            with contextlib.suppress(BrokenPipeError):  # the guard was killed
                os.write(to_guard, b"%d\n" % ranks[-1].pid)
        store.start()
        return _watch(ranks, interrupted)
    finally:
        _end(ranks)
        guard.kill()
        guard.wait()
        os.close(to_guard)
        store.close()
        for number, handler in previous.items():
            signal.signal(number, handler)


def launch_quietly(
    command: list[str], num_processes: int, *, environment: dict[str, str] | None = None, pass_fds: Collection[int] = ()
) -> tuple[int, str]:
    """As :func:`launch`, but the ranks' standard output and error go to an unnamed file. ``command`` gets one more
    argument, a descriptor of this process's standard error, for messages that are to be seen at once.

    Returns:
        The exit code, and the text that the ranks have printed.
    """
    aloud = os.dup(2)
    try:
        with tempfile.TemporaryFile("a+b") as log:
            files = {"log": log, "pass_fds": (*pass_fds, aloud)}
            code = launch([*command, str(aloud)], num_processes, environment=environment, **files)
            log.seek(0)
            return code, log.read().decode(errors="replace")
    finally:
        os.close(aloud)


def _sharing(ranks: int, environment: dict[str, str]) -> int:
    """How many of ``ranks`` share the fullest CUDA device that they see; prints a line if it is more than one."""
    if ranks == 1 or not allocator.may_have_cuda(environment):  # looking for devices imports torch
        return 1
    devices = device_sharing.visible_devices()
    sharing = device_sharing.ranks_of_fullest(ranks, devices)
    if sharing > 1:
        _say(device_sharing.said(ranks, devices))
    return sharing


def _say(text: str) -> None:
    print(f"launch: {text}", file=sys.stderr, flush=True)


def _watch(ranks: list[Rank], interrupted: list[int]) -> int:
    """Wait until all ranks have succeeded or one has failed, and return the exit code."""
    while True:
        if interrupted:
            _say(f"{signal.Signals(interrupted[0]).name} received; ending all ranks")
            return 128 + interrupted[0]
        codes = _codes(ranks)
        failed = [rank for rank, code in enumerate(codes) if code not in (None, 0)]
        if failed:
            time.sleep(SETTLE_SECONDS)
            deadline = time.monotonic() + CAUSE_SECONDS
            while cause_of(_codes(ranks))[1] == PEER_LOST_CODE and time.monotonic() < deadline:
                time.sleep(0.05)
            return _report(ranks, *cause_of(_codes(ranks)))
        if all(code == 0 for code in codes):
            return 0
        time.sleep(0.05)


def _codes(ranks: list[Rank]) -> list[int | None]:
    return [rank.poll() for rank in ranks]


def cause_of(codes: list[int | None]) -> tuple[int, int]:
    """``(rank, exit code)`` of the rank whose failure explains the others; at least one rank has failed.

    Bad input (2) comes first, then SIGKILL, which no rank sends itself, then other signals, then errors, which may be
    those of a rank that lost its peer. A rank that says that it lost a peer comes last.
    """
    failed = [(rank, code) for rank, code in enumerate(codes) if code not in (None, 0)]
    order = lambda one: (one[1] != 2, one[1] != -signal.SIGKILL, one[1] > 0, one[1] == PEER_LOST_CODE, one[0])
    return min(failed, key=order)


def _report(ranks: list[Rank], first: int, code: int) -> int:
    if code == 2:  # the rank has said what is wrong; the others say the same or nothing
        return 2
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    memory = OUT_OF_MEMORY if code == -signal.SIGKILL else ""
    _say(f"rank {first} (process {ranks[first].pid}) {how}; ending the other ranks{memory}")
    return 1


def _end(ranks: list[Rank]) -> None:
    """End every rank that still runs, with SIGTERM and then SIGKILL, and what failed ranks have started."""
    for rank in ranks:
        if rank.poll() is None:
            rank.terminate()
    deadline = time.monotonic() + GRACE_SECONDS
    for rank in ranks:
        try:
            rank.wait(timeout=max(deadline - time.monotonic(), 0.01))
        except subprocess.TimeoutExpired:
            rank.kill()
            rank.wait()
    for rank in ranks:
        if rank.returncode:  # see _guard
            with contextlib.suppress(ProcessLookupError):
                os.killpg(rank.pid, signal.SIGKILL)


def main() -> int:
    parser = argparse.ArgumentParser(prog="megatron_ext.launch.launcher", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--nproc-per-node", type=int, required=True)
    how = parser.add_mutually_exclusive_group()
    how.add_argument("-m", "--module", action="store_true", help="the script is a module's name, as with python -m")
    how.add_argument("--fork", action="store_true", help="import the script once, then fork the ranks (on the CPU)")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    args = parser.parse_args()
    if args.nproc_per_node < 1 or not args.command:
        parser.error("at least one process and a script are needed")
    if args.fork:
        restart_with({**allocator.rank_variables(), "OMP_NUM_THREADS": "1"})
        if import_script(args.command[0]):
            return launch(args.command, args.nproc_per_node, fork=True)
    return launch([sys.executable, *(["-m"] if args.module else []), *args.command], args.nproc_per_node)


if __name__ == "__main__":
    sys.exit(main())
