"""Nodes of a cluster on one machine: network namespaces joined by a bridge, each link shaped.

A node is a network namespace with one interface, ``net0``; its other end hangs on a bridge in a
namespace of its own, so that no interface or address outside these namespaces is touched. The
kernel's token bucket (``tc tbf``, see tc-tbf(8)) shapes both directions of every link: bytes take
time on it, and no processor. Ranks of one node reach each other over its loopback, unshaped.

``emulated_nodes.py COMMAND...`` runs a rank's command inside its node, and ``emulated_nodes.py SCRIPT.py ...`` a script
in this process, which so finds imported what a launcher has imported before it forked this rank.
"""

import ctypes
import json
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys

from megatron_ext.formats.errors import InputError

NETWORK = "10.77.0"
INTERFACE = "net0"
PREFIX = "mxnode"
_CLONE_NEWNET = 0x40000000
# Of a packet of 1500 bytes with TCP's timestamps; Ethernet, IP and TCP headers.
_PAYLOAD, _HEADERS = 1_448, 66


class Nodes:
    """``count`` nodes whose links carry ``gbit_s`` Gbit/s each way; a context manager.

    Raises:
        InputError: not root, iproute2 missing, or a kernel without namespaces or ``tbf``.
    """

    def __init__(self, count: int, gbit_s: float):
        if count < 2 or count > 200:
            raise InputError("expected 2 to 200", field="--nodes", value=count)
        if not 0.001 <= gbit_s <= 100:
            raise InputError("expected 0.001 to 100 Gbit/s", field="--gbit", value=gbit_s)
        check_possible()
        self.count, self.gbit_s = count, gbit_s
        self.names = [f"{PREFIX}-{os.getpid()}-{index}" for index in range(count)]
        self.switch = f"{PREFIX}-{os.getpid()}-switch"

    def __enter__(self) -> "Nodes":
        remove_leftovers()
        # Asked to end, end as on Ctrl-C: through __exit__.
        self._previous = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
        try:
            self._make()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _make(self) -> None:
        for name in (self.switch, *self.names):
            _run("ip", "netns", "add", name)
        _run("ip", "-n", self.switch, "link", "add", "br0", "type", "bridge")
        _run("ip", "-n", self.switch, "link", "set", "br0", "up")
        for index, name in enumerate(self.names):
            port = f"port{index}"
            _run("ip", "-n", self.switch, "link", "add", port, "type", "veth", "peer", "name", INTERFACE, "netns", name)
            _run("ip", "-n", self.switch, "link", "set", port, "master", "br0", "up")
            _run("ip", "-n", name, "address", "add", f"{NETWORK}.{index + 1}/24", "dev", INTERFACE)
            _run("ip", "-n", name, "link", "set", INTERFACE, "up")
            _run("ip", "-n", name, "link", "set", "lo", "up")
            _steady_tcp(name, self.gbit_s)
            _shape(name, INTERFACE, self.gbit_s)
            _shape(self.switch, port, self.gbit_s)

    def __exit__(self, *_) -> None:
        signal.signal(signal.SIGTERM, self._previous)
        for name in (*self.names, self.switch):
            subprocess.run(["ip", "netns", "del", name], stderr=subprocess.DEVNULL)

    def environment(self, ranks_per_node: int) -> dict[str, str]:
        """Variables for this file as a program, and the ranks that it becomes."""
        return {
            "EMULATED_NODES": ",".join(self.names),
            "EMULATED_PER_NODE": str(ranks_per_node),
            "EMULATED_MASTER": f"{NETWORK}.1",
            "GLOO_SOCKET_IFNAME": INTERFACE,
        }

    def sent_bytes(self) -> list[int]:
        """Bytes that each node has sent over its link until now, with Ethernet, IP and TCP headers."""
        shown = (json.loads(_run("ip", "-n", name, "-s", "-j", "link", "show", INTERFACE)) for name in self.names)
        return [links[0]["stats64"]["tx"]["bytes"] for links in shown]


def check_possible() -> None:
    """Raises InputError with one line where namespaces cannot be made here."""
    if os.geteuid() != 0:
        raise InputError("network namespaces need root: run this as root", field="user", value=os.geteuid())
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            raise InputError("is not installed: it comes with the package iproute2", field="command", value=tool)


def remove_leftovers() -> None:
    """Remove nodes whose benchmark was killed before it could."""
    for line in _run("ip", "netns", "list").splitlines():
        found = re.match(rf"({PREFIX}-(\d+)-\w+)", line)
        if found and not os.path.exists(f"/proc/{found[2]}"):
            subprocess.run(["ip", "netns", "del", found[1]], stderr=subprocess.DEVNULL)


def enter(name: str) -> None:
    """Move this process into a node. Raises OSError where the kernel refuses."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{name}") as file:
        if libc.setns(file.fileno(), _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"cannot enter network namespace {name}")


def _steady_tcp(namespace: str, gbit_s: float) -> None:
    """A sender is slowed by the link and by nothing else; both settings are the namespace's own.

    A host's default may be BBR, which guesses a flow's rate from what it got before: flows of 2 and 8 MiB that come
    and go had 0.68 to 0.96 of a free link of 0.13 Gbit/s, with Reno 0.93 to 0.96. Windows of 2 ms of the link's bytes
    keep queues short, so nothing is lost and a small message does not wait for a quarter of a second of others; a
    window is kept over pauses, as on links that are not TCP's.
    """
    window = max(int(gbit_s * 1e9 / 8 / 500), 262_144)
    settings = {"tcp_congestion_control": "reno", "tcp_slow_start_after_idle": "0", "tcp_wmem": f"4096 16384 {window}"}
    for name, value in settings.items():
        _run("ip", "netns", "exec", namespace, "sh", "-c", f"echo {value} > /proc/sys/net/ipv4/{name}")


def bucket_bytes(gbit_s: float) -> tuple[int, int]:
    """The largest segment that the kernel hands over in one piece, and the token bucket that it has to fit, in bytes.

    What the bucket holds passes without taking any time, so a message of that size behind a pause would seem faster
    than the link: 0.4 ms of bytes, and room for the headers of every packet of the segment, which ``tbf`` counts: a
    segment that does not fit is cut into its packets, and each of them takes processor time (at 1.05 Gbit/s, where it
    lacked four bytes, all-gathers took half as long again).
    """
    segment = max(int(gbit_s * 1e9 / 8 / 2500), 16_384)
    return min(segment, 65_536), segment + (segment // _PAYLOAD + 1) * _HEADERS + 2_000


def _shape(namespace: str, interface: str, gbit_s: float) -> None:
    # The queue is deep enough that TCP is slowed by waiting, not by loss.
    segment, bucket = bucket_bytes(gbit_s)
    _run("ip", "-n", namespace, "link", "set", "dev", interface, "gso_max_size", str(segment))
    limit = max(int(gbit_s * 1e9 / 8 / 20), 4_000_000)
    rate = f"{int(gbit_s * 1e6)}kbit"
    tbf = f"root tbf rate {rate} burst {bucket} limit {limit}"
    _run("tc", "-n", namespace, "qdisc", "add", "dev", interface, *tbf.split())


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        message = (done.stderr.strip().splitlines() or ["failed"])[0]
        raise InputError(message, field="command", value=" ".join(command))
    return done.stdout


def main() -> None:
    """Become a rank's command inside its node, which follows from RANK, as on a cluster: signals and exit codes pass
    unchanged.

    The launcher starts this once a rank, with the variables of ``Nodes.environment``. Where there are as many
    processors as nodes each node has its own; else all share all of them, which the measurement sees and the cost
    table says.
    """
    rank, per_node = int(os.environ["RANK"]), int(os.environ["EMULATED_PER_NODE"])
    nodes, node = os.environ["EMULATED_NODES"].split(","), rank // per_node
    enter(nodes[node])
    every = sorted(os.sched_getaffinity(0))
    own = every[node :: len(nodes)] if len(every) >= len(nodes) else every
    os.sched_setaffinity(0, own)
    os.environ |= {
        "LOCAL_RANK": str(rank % per_node),
        "LOCAL_WORLD_SIZE": str(per_node),
        "MASTER_ADDR": os.environ["EMULATED_MASTER"],
    }
    del os.environ["TORCHELASTIC_USE_AGENT_STORE"]  # rank 0 makes the store, inside its node
    if sys.argv[1].endswith(".py"):
        sys.argv = sys.argv[1:]
        runpy.run_path(sys.argv[0], run_name="__main__")
    else:
        os.execvp(sys.argv[1], sys.argv[1:])


if __name__ == "__main__":
    main()
