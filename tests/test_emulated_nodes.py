"""Links between emulated nodes (benchmarks/emulated_nodes.py): one segment passes in one piece, at every rate."""

import json
import subprocess
import sys

import pytest

from megatron_ext.errors import InputError
from places import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
from emulated_nodes import INTERFACE, Nodes, bucket_bytes, check_possible  # noqa: E402

RECEIVE = """
import socket
connection, _ = socket.create_server(("10.77.0.2", 5001)).accept()
while connection.recv(1 << 20):
    pass
"""
SEND = """
import socket, time
for _ in range(100):
    try:
        connection = socket.create_connection(("10.77.0.2", 5001))
        break
    except ConnectionRefusedError:
        time.sleep(0.05)
connection.sendall(bytes(20 << 20))
"""


def test_the_bucket_holds_a_segment_and_the_headers_of_its_packets():
    for gbit_s in [step / 100 for step in range(1, 1001)]:
        segment, bucket = bucket_bytes(gbit_s)
        packets = -(-segment // 1448)
        assert segment + packets * 66 <= bucket
        # What passes without taking time stays below 0.5 ms of the link, or a segment with its headers.
        assert bucket <= max(gbit_s * 1e9 / 8 * 0.5e-3, 16_384 * 1.05) + 2_100


@pytest.mark.parametrize("gbit_s", [0.13, 1.0, 1.05])
def test_a_shaped_link_sends_segments_whole(gbit_s):
    try:
        check_possible()
        nodes = Nodes(2, gbit_s)
        nodes.__enter__()
    except InputError as error:
        pytest.skip(f"no emulated nodes here: {error}")
    try:
        within = ["ip", "netns", "exec"]
        receiver = subprocess.Popen([*within, nodes.names[1], sys.executable, "-c", RECEIVE])
        subprocess.run([*within, nodes.names[0], sys.executable, "-c", SEND], check=True)
        assert receiver.wait(timeout=20) == 0
        shown = subprocess.run(["ip", "-n", nodes.names[0], "-s", "-j", "link", "show", INTERFACE], capture_output=True, text=True, check=True)
    finally:
        nodes.__exit__()
    sent = json.loads(shown.stdout)[0]["stats64"]["tx"]
    assert (20 << 20) < sent["bytes"] < (20 << 20) * 1.02
    assert sent["packets"] < (20 << 20) / 1448 / 3
