"""A busy link on another thread: every rank repeats it equally often, and it does disturb."""

import multiprocessing
import os
import socket
import time
from contextlib import contextmanager
from itertools import product
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from msgspec.structs import replace

from megatron_ext.measure.contention import KINDS, SIZES, Busy, fitting, kinds, leader_of, pairs, size_of
from megatron_ext.measure.fabric import Fabric, shared_bytes
from megatron_ext.measure.operations import PublishAcross, TimedPublish
from megatron_ext.measure.options import Options
from megatron_ext.measure.sampling import sample
from megatron_ext.runtime.device import HostDevice
from megatron_ext.runtime.issuer import Issuer
from megatron_ext.runtime.routes.stream_route import StreamRoute
from megatron_ext.runtime.worker import Worker

OPTIONS = Options(data_parallel_size=2, pipeline_model_parallel_size=2, max_bytes=1 << 16)
INSTANCES = Options(data_parallel_size=2, num_distributed_optimizer_instances=2, max_bytes=1 << 16)
TENSOR = Options(data_parallel_size=2, tensor_model_parallel_size=2, max_bytes=1 << 16)


def rank_program(options: Options, names, rank: int, block: int, port: int, queue) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, options.world_size, is_master=rank == 0, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=options.world_size)
    fabric = Fabric(options, rank, os.dup(block))
    counts = {}
    for name in names:
        operation = KINDS[name](fabric, busy=True)
        plain, issued = operation.issue, []

        def issue(size_bytes, round_index, plain=plain, issued=issued):
            issued.append(round_index)
            return plain(size_bytes, round_index)

        operation.issue = issue
        busy = Busy(fabric, operation, 1 << 16)
        for _ in range(2):  # started again, it is a new count
            busy.start()
            measured = KINDS["publish"](fabric)
            sample(fabric, measured, 1 << 16, seconds=0.05)
            time.sleep(0.01 * rank)  # ranks stop at different times
            busy.stop()
            measured.close()
        operation.close()
        counts[name] = len(issued)
    fabric.barrier()
    queue.put((rank, counts))
    queue.close()
    queue.join_thread()
    os._exit(0)


@pytest.mark.parametrize("ranks_per_node, across", [(4, False), (2, False), (1, True)])
def test_publishing_takes_the_network_where_a_group_spans_nodes(ranks_per_node, across):
    fabric = SimpleNamespace(
        options=Options(data_parallel_size=2, pipeline_model_parallel_size=2, ranks_per_node=ranks_per_node)
    )
    assert kinds(fabric)["publish"] is (PublishAcross if across else TimedPublish)


@pytest.mark.parametrize(
    ("name", "instances", "tp", "sets"),
    [
        *[("gpu", 1, 1, 8), ("p2p", 1, 1, 4 * 32), ("publish", 1, 1, 64)],
        *[("gpu", 2, 1, 16), ("reduce", 2, 1, 8), ("publish", 2, 1, 128)],
        *[("gpu", 1, 4, 32), ("reduce", 1, 4, 32), ("reduce", 2, 4, 32), ("p2p", 1, 4, 4 * 32), ("publish", 1, 4, 64)],
    ],
)
def test_every_set_of_ranks_has_one_leader(name, instances, tp, sets):
    """8 pipeline ranks of 4 nodes with 8 ranks each: 64 sets of counterparts for publishing, or of each instance."""
    dp = 32 // instances // tp
    options = Options(data_parallel_size=dp, pipeline_model_parallel_size=8, ranks_per_node=8)
    options = replace(options, num_distributed_optimizer_instances=instances, tensor_model_parallel_size=tp)
    leaders = {}
    for rank in range(options.world_size):
        group, dp_rank = options.data_place(rank)
        fabric = SimpleNamespace(options=options, rank=rank, pp_rank=rank // 32, data_group=group, dp_rank=dp_rank)
        operation = object.__new__(KINDS[name] if name != "publish" else PublishAcross)
        operation.exchange = SimpleNamespace(dp_ranks=tuple(range(fabric.dp_rank % (8 // tp), dp, 8 // tp)))
        leaders.setdefault(leader_of(fabric, operation), []).append(rank)
    assert len(leaders) == sets
    assert all(leader in members for leader, members in leaders.items())


@pytest.mark.parametrize(
    ("pp", "dp", "of_node"), [(4, 1, 4), (4, 1, 2), (4, 2, 4), (8, 2, 8), (3, 1, 2), (3, 1, 3), (5, 2, 4)]
)
def test_one_of_the_ranks_that_exchange_messages_leads(pp, dp, of_node):
    """Also where those of the second and the third stage do, because these are on different nodes."""
    options = Options(data_parallel_size=dp, pipeline_model_parallel_size=pp, ranks_per_node=of_node)
    found = []
    for rank in range(options.world_size):
        fabric = SimpleNamespace(
            options=options, rank=rank, pp_rank=rank // dp, data_group=rank // dp, dp_rank=rank % dp
        )
        found.append(leader_of(fabric, object.__new__(KINDS["p2p"])))
    members = {leader: [rank for rank, own in enumerate(found) if own == leader] for leader in found}
    for rank, peer in enumerate(options.peers):
        assert members[found[rank]] == sorted({rank, rank if peer is None else peer})
    assert all(leader in ranks for leader, ranks in members.items())


def test_no_transfer_is_larger_than_what_is_measured():
    """Shapes of a large model: one message between pipeline ranks is larger than the largest group."""
    large = SimpleNamespace(options=Options(hidden_size=12288, seq_length=8192, micro_batch_size=4, max_bytes=1 << 28))
    assert size_of(large, "p2p", 2 << 20) == 1 << 28 and size_of(large, "gpu", 2 << 20) == 2 << 20
    small = SimpleNamespace(options=Options(hidden_size=128, seq_length=64, micro_batch_size=2))
    assert size_of(small, "p2p", 2 << 20) == 64 * 2 * 128 * 4


def test_transfers_are_smaller_on_a_network_that_is_too_slow_for_all_pairs():
    us = {"gpu": 108e3, "publish": 73e3, "compute": 10e3}
    wanted = [(a, b) for a in us for b in us if a != b]
    most_s = sum(6 * us[a] + 4 * us[b] for a, b in wanted) / 1e6
    assert fitting(us, wanted, most_s, *SIZES["cpu"]) == 2 << 20
    assert fitting(us, wanted, most_s / 2.5, *SIZES["cpu"]) == 1 << 19
    assert fitting(us, wanted, 0.0, *SIZES["cpu"]) == 1 << 18


def test_pairs_on_the_network_come_before_the_copies():
    def ordered(ranks_per_node):
        links = ("compute", "gpu", "cpu", "publish", "reduce")
        options = Options(data_parallel_size=4, ranks_per_node=ranks_per_node, links=links)
        return pairs(SimpleNamespace(options=options, pipe=None, torch_device=torch.device("cpu")))

    assert ordered(4).index(("gpu", "cpu")) < ordered(4).index(("gpu", "publish"))
    assert ordered(2).index(("gpu", "cpu")) > ordered(2).index(("gpu", "publish"))
    assert set(ordered(2)) == set(ordered(4)) and len(ordered(2)) == 20
    assert ordered(4).index(("compute", "reduce")) < ordered(4).index(("compute", "publish"))


@contextmanager
def counted(options: Options, *names: str):
    """By rank, how often it issued each of ``names``."""
    context = multiprocessing.get_context("fork")
    block = os.memfd_create("test")
    os.ftruncate(block, shared_bytes(options))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    queue = context.Queue()
    ranks = [
        context.Process(target=rank_program, args=(options, names, rank, block, port, queue))
        for rank in range(options.world_size)
    ]
    for rank in ranks:
        rank.start()
    try:
        yield dict(queue.get(timeout=300) for _ in ranks)
    finally:
        for rank in ranks:
            rank.kill()
            rank.join()
        os.close(block)


@pytest.fixture(scope="module")
def counts():
    with counted(OPTIONS, "gpu", "reduce", "p2p", "cpu") as found:
        yield found


def test_instances_of_the_optimizer_reduce_equally_often():
    with counted(INSTANCES, "gpu", "reduce") as found:
        assert len({found[rank]["reduce"] for rank in range(4)}) == 1 and found[0]["reduce"] > 2
        assert found[0]["gpu"] == found[1]["gpu"] > 2 and found[2]["gpu"] == found[3]["gpu"] > 2


def test_tensor_parallel_ranks_gather_among_their_own():
    with counted(TENSOR, "gpu", "reduce") as found:
        for name, first in product(("gpu", "reduce"), (0, 1)):
            assert found[first][name] == found[first + 2][name] > 2


@pytest.mark.parametrize("name", ["gpu", "reduce"])
def test_collectives_are_called_equally_often_by_a_group(counts, name):
    assert counts[0][name] == counts[1][name] > 2
    assert counts[2][name] == counts[3][name] > 2


def test_messages_are_sent_as_often_as_received(counts):
    assert counts[0]["p2p"] == counts[2]["p2p"] > 2
    assert counts[1]["p2p"] == counts[3]["p2p"] > 2


def test_copies_need_nobody(counts):
    assert all(counts[rank]["cpu"] > 2 for rank in range(4))


def test_a_drive_that_is_kept_busy_does_not_copy_to_the_device():
    """The copy from the slot is one of link ``cpu``: the simulator queues it there, with the rows of ``cpu``."""
    read, device, target = object.__new__(KINDS["nvme"]), HostDevice(), torch.zeros(1 << 10)
    read.fabric, read.memory = SimpleNamespace(window=lambda *_: target, device=device), None
    read.size_bytes, read.slot = 1 << 16, bytearray(1 << 16)
    read.staged, read.route, read.issuer = torch.ones(1 << 14), StreamRoute("test", device), Issuer()
    read.drive = SimpleNamespace(read=lambda slot, offset, name: slot.__setitem__(0, 1))
    read.worker = Worker("test")
    for to_device in (False, True):
        read.to_device = to_device or read.to_device
        read.slot[0] = 0
        read.issue(4096, 1).wait()
        assert bool(target.all()) == to_device
    read.worker.close()
    read.route.close()
