"""scripts/slow_links.sh: the command's network is as slow as asked for, and other links are told."""

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
print(time.perf_counter() - start, os.environ["MEGATRON_EXT_FAULTS"])
"""


def test_bytes_take_their_time_on_the_loopback_interface():
    command = ["bash", str(SCRIPTS / "slow_links.sh"), "50", "20", "10", sys.executable, "-c", SENDS]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode and ("unshare" in done.stderr or "command not found" in done.stderr):
        pytest.skip(f"no network of its own can be made here: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    seconds, faults = done.stdout.split()
    assert 0.8 * 10 / 50 < float(seconds) < 10 * 10 / 50  # what the kernel lets pass at first has no rate
    assert faults == "network_mb=50,host_link_mb=20,drive_mb=10"


@pytest.mark.parametrize("value", ["fast", "250 250", "250 250 0.5"])
def test_other_rates_are_refused(value):
    done = subprocess.run(
        ["bash", str(SCRIPTS / "pretrain_gpt_hybrid.sh")], env={"SLOW_LINKS": value}, capture_output=True, text=True
    )
    assert done.returncode == 2 and f"SLOW_LINKS = '{value}': expected three whole numbers" in done.stderr
