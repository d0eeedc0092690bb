"""scripts/slow_links.sh: the command's network is as slow as asked for, and other links are told."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[3] / "scripts"
SENDS = """
import os, socket, threading, time
listener = socket.create_server(("127.0.0.1", 0))
sender = socket.create_connection(listener.getsockname())
receiver, _ = listener.accept()
threading.Thread(target=sender.sendall, args=(bytes(10_000_000),)).start()
start, left = time.perf_counter(), 10_000_000
while left:
    left -= len(receiver.recv(1 << 20))
print(time.perf_counter() - start, os.environ["MEGATRON_EXT_SLOW_LINKS"])
"""


def has_namespaces() -> bool:
    """Asked without the script, so that a broken one is not taken for a machine that cannot."""
    command = ["unshare", *([] if os.geteuid() == 0 else ["--map-root-user"]), "--net", "true"]
    found = all(map(shutil.which, ("unshare", "ip", "tc")))
    return found and subprocess.run(command, capture_output=True).returncode == 0


@pytest.mark.skipif(not has_namespaces(), reason="no network namespaces, or no iproute2")
def test_bytes_take_their_time_on_the_loopback_interface():
    command = ["bash", str(SCRIPTS / "slow_links.sh"), "50", "20", "10", sys.executable, "-c", SENDS]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    seconds, rates = done.stdout.split()
    assert 0.8 * 10 / 50 < float(seconds) < 10 * 10 / 50  # what the kernel lets pass at first has no rate
    assert rates == "network_mb=50,host_link_mb=20,drive_mb=10"


@pytest.mark.parametrize("value", ["fast", "250 250", "250 250 0.5"])
def test_other_rates_are_refused(value):
    done = subprocess.run(
        ["bash", str(SCRIPTS / "pretrain_gpt_hybrid.sh")], env={"SLOW_LINKS": value}, capture_output=True, text=True
    )
    assert done.returncode == 2 and f"SLOW_LINKS = '{value}': expected three whole numbers" in done.stderr
