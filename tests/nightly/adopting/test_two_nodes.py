"""The page's commands for two nodes, run on two network namespaces. Needs root and iproute2."""

import os
import subprocess
import sysconfig
import textwrap
from pathlib import Path

import pytest
from adopting_page import PAGE, SHORTER, add_script, cpu_commands, make_checkout
from places import ROOT

from benchmarks.emulated_nodes import NETWORK, Nodes
from megatron_ext import checkout


def node_commands() -> list[str]:
    """The commands that the page gives on each node; two processes a node, and measuring for less time."""
    section = PAGE.read_text().partition("\n### torchrun on two nodes\n")[2]
    block = textwrap.dedent(section.partition("    # on each of the two nodes\n")[2].partition("\n\n")[0])
    for written, here in (("-node 8", "-node 2"), ("HOST:", "node1:"), ("prepare ", "prepare --seconds 5 ")):
        assert written in block
        block = block.replace(written, here)
    return [f"torchrun{command}" for command in block.split("torchrun")[1:]]


@pytest.fixture
def nodes():
    """Two nodes whose names lead to their addresses, as a cluster's do."""
    with Nodes(2, 1.0) as made:
        folders = [Path("/etc/netns", name) for name in made.names]
        for folder in folders:
            folder.mkdir(parents=True)
            rows = [f"{NETWORK}.{index + 1} node{index + 1}" for index in range(made.count)]
            (folder / "hosts").write_text("\n".join(["127.0.0.1 localhost", *rows, ""]))
        try:
            yield made
        finally:
            for folder in folders:
                (folder / "hosts").unlink()
                folder.rmdir()


def on_every_node(nodes: Nodes, command: str, work: Path) -> list[str]:
    """Run a command on all nodes at once; what each has written."""
    path = os.pathsep.join([sysconfig.get_path("scripts"), os.environ["PATH"]])
    environment = {key: value for key, value in os.environ.items() if key != "MEGATRON_PATH"}
    processes = [
        subprocess.Popen(
            ["ip", "netns", "exec", name, "unshare", "--uts"]
            + ["bash", "-euc", f"hostname node{index + 1}; . ./args.sh; {command}"],
            cwd=work,
            env=environment | {"PATH": path, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for index, name in enumerate(nodes.names)
    ]
    said = [process.communicate(timeout=280)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], said[0][-3000:] + said[1][-3000:]
    return said


def test_the_commands_for_two_nodes_end_with_an_equal_run(nodes, tmp_path):
    make_checkout(tmp_path, tmp_path / "core")
    checkout.apply(tmp_path / "Megatron-LM")
    add_script(tmp_path / "Megatron-LM")
    (arguments,) = (block for block in cpu_commands(SHORTER) if "args.sh <<" in block)
    subprocess.run(["bash", "-euc", arguments], cwd=tmp_path, check=True)

    prepare, train = node_commands()
    first, second = on_every_node(nodes, prepare, tmp_path)
    assert "measuring for 5 s on 4 ranks" in first and "verdict: " in first and "prepare:" not in second
    train += " --user-defined-schedule-check runs/first/reference.json"
    reference, _ = on_every_node(nodes, train, tmp_path)
    assert "this was the reference" in reference
    before = sum(nodes.sent_bytes())
    scheduled, _ = on_every_node(nodes, train, tmp_path)
    assert "equal to the reference in runs/first/reference.json to the last bit" in scheduled
    assert sum(nodes.sent_bytes()) - before > 10_000_000, "gradients of five iterations cross the network"
