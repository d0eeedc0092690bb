"""Ranks that a launcher has started agree with the first before they meet to measure."""

import os
import re
import socket

import pytest
from places import ROOT
from variations import some
from warm_python import WarmPython

PROGRAM = """
import os, resource, time
import torch.distributed as dist
from megatron_ext.measure import cluster_launch
_, most = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (min(256, most), most))  # too few for the connections of many ranks
time.sleep(float(os.environ["LATE"]))
said = cluster_launch.said_by_first(f"of rank {os.environ['RANK']}")
cluster_launch.meet(False, 1)
print(said, dist.get_world_size(), resource.getrlimit(resource.RLIMIT_NOFILE) == (most, most))
"""


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def test_what_the_first_rank_says_holds_and_they_meet_behind_it(tmp_path):
    """As srun starts them: rank 0 serves the store, and is the last and the first to come."""
    for late in (0, 1):
        shared = {**os.environ, "PYTHONPATH": str(ROOT), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
        shared |= {"WORLD_SIZE": "2", "CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": "lo"}
        places = [tmp_path / f"{late}.{rank}" for rank in range(2)]
        ranks = []
        for rank, place in enumerate(places):
            own = {**shared, "RANK": str(rank), "LATE": "2" if rank == late else "0"}
            with place.open("w") as said:
                ranks.append(WarmPython(["-c", PROGRAM], ROOT, own, said, 2, imported="torch"))
        assert [rank.wait(300) for rank in ranks] == [0, 0]
        assert [place.read_text() for place in places] == ["of rank 0 2 True\n"] * 2


LAYERS = """
import os
from megatron_ext.formats.errors import InputError

def runners(arguments):
    if os.environ["RANK"] == os.environ["REFUSES"]:
        exec(os.environ["FAULT"])
    return {"transformer": Runner()}

class Runner:
    forward = backward = lambda self: None
"""
MEASURE = "measure --out OUT --links gpu,nvme,compute --nvme-path DRIVE --modules LAYERS --seconds 60"
NO_LAYER = "raise InputError('has no such layer', field='--of-the-model')"
FAILS_LATER = "from megatron_ext.measure import size_grid; size_grid.curves_asked = None"
REFUSED = {
    "the drive is missing on the second node": (MEASURE, {"drive": "1"}, "--nvme-path = .*: is not a directory"),
    "the table cannot be written on the first": (MEASURE, {"out": "0"}, "/proc/nowhere/T.json: cannot be w"),
    "the layers are refused on the first": (MEASURE, {"layers": "0"}, "--of-the-model: has no such layer"),
    "the layers are refused on the second": (MEASURE, {"layers": "1"}, "--of-the-model: has no such layer"),
    "the second fails": (MEASURE, {"layers": "1", "fault": FAILS_LATER}, "TypeError.*not callable"),
    "doctor: the drive is missing on the second": ("doctor --out OUT --nvme DRIVE", {"drive": "1"}, "--nvme = "),
}


@pytest.mark.parametrize("case", some([*REFUSED], 3))
def test_a_refusal_on_one_node_ends_the_ranks_of_all(tmp_path, case):
    """Each rank is a node of its own, as under srun, and no launcher ends the other. Both end long before they would
    give up waiting."""
    words, lacks, said = REFUSED[case]
    (tmp_path / "layers.py").write_text(LAYERS)
    shared = {**os.environ, "PYTHONPATH": str(ROOT), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    shared |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": "lo"}
    shared |= {"REFUSES": lacks.get("layers", "none"), "FAULT": lacks.get("fault", NO_LAYER)}
    ranks, places = [], [tmp_path / f"said.{rank}" for rank in range(2)]
    for rank, place in enumerate(places):
        own = {
            "OUT": "/proc/nowhere/T.json" if lacks.get("out") == str(rank) else f"{tmp_path}/T.json",
            "DRIVE": f"{tmp_path}/missing" if lacks.get("drive") == str(rank) else str(tmp_path),
            "LAYERS": f"{tmp_path}/layers.py:runners",
        }
        command = ["-m", "megatron_ext", *(own.get(word, word) for word in words.split())]
        with place.open("w") as file:
            ranks.append(WarmPython(command, ROOT, {**shared, "RANK": str(rank)}, file, file, imported="torch"))
    code = 1 if "fault" in lacks else 2
    assert [rank.wait(200) for rank in ranks] == [code] * 2, [place.read_text() for place in places]
    for place in places:
        (line,) = [one for one in place.read_text().splitlines() if one.startswith("megatron-ext: ")]
        assert re.match(f"megatron-ext: on {re.escape(socket.gethostname())}: {said}", line)


ONE_SEES_A_DEVICE = """
import os
from megatron_ext.formats.errors import InputError
from megatron_ext.measure import cluster_launch
try:
    cluster_launch.meet(os.environ["RANK"] == "0", 1)
except InputError as error:
    print(error)
"""


def test_ranks_of_which_some_see_no_device_end_with_one_line(tmp_path):
    """They would make other process groups than the rest, and all would wait: doctor and measure look for devices."""
    shared = {**os.environ, "PYTHONPATH": str(ROOT), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    shared |= {"WORLD_SIZE": "2", "CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": "lo"}
    ranks, places = [], [tmp_path / f"said.{rank}" for rank in range(2)]
    for rank, place in enumerate(places):
        with place.open("w") as said:
            words = ["-c", ONE_SEES_A_DEVICE]
            ranks.append(WarmPython(words, ROOT, {**shared, "RANK": str(rank)}, said, 2, imported="torch"))
    assert [rank.wait(100) for rank in ranks] == [0, 0]
    for rank, (place, sees) in enumerate(zip(places, ("a", "no"))):
        said = f"--device: torch sees {sees} CUDA device on 1 of 2 ranks only, among them rank {rank}"
        assert place.read_text().strip() == said


ALONE = """
from datetime import timedelta
from megatron_ext.formats.errors import InputError
from megatron_ext.measure import cluster_launch
cluster_launch.PATIENCE = timedelta(seconds=2)
try:
    cluster_launch.said_by_first("")
except InputError as error:
    print(error)
"""


@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_rank_whose_others_were_refused_on_their_node_ends_with_one_line(tmp_path, rank):
    """No launcher ends ranks of another node."""
    own = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "WORLD_SIZE": "2", "RANK": rank}
    own |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    with (tmp_path / "said").open("w+") as said:
        assert WarmPython(["-c", ALONE], ROOT, own, said, 2, imported="torch").wait(100) == 0
        said.seek(0)
        (line,) = said.read().splitlines()
    assert line.startswith("WORLD_SIZE = 2: the ranks cannot meet")
