"""Ranks that a launcher has started agree with the first before they meet to measure."""

import os
import socket

import pytest
from places import ROOT
from warm_python import WarmPython

PROGRAM = """
import os, time
import torch.distributed as dist
from megatron_ext.measure import cluster_launch
time.sleep(float(os.environ["LATE"]))
said = cluster_launch.said_by_first(f"of rank {os.environ['RANK']}")
cluster_launch.meet(False, 1)
print(said, dist.get_world_size())
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
        assert [place.read_text() for place in places] == ["of rank 0 2\n"] * 2


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
    assert line.startswith("WORLD_SIZE = 2: not all ranks came to measure")
