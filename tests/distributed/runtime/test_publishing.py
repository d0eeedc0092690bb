"""What goes wrong while copies are written: nobody waits for ever, and nothing is closed under a writer."""

import errno
import os
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import faults
import pytest
import torch
from places import HELPERS
from variations import some

from megatron_ext.formats.errors import InputError
from megatron_ext.runtime.device import HostDevice
from megatron_ext.runtime.drive import DriveError
from megatron_ext.runtime.executor import Executor
from megatron_ext.runtime.group import Clock, RankGroup, ScheduleError, WholeBytes
from megatron_ext.runtime.host_pool import COPY, HostPool, PeerLost, Sharers
from megatron_ext.runtime.issuer import Issuer
from megatron_ext.runtime.node_copies import NodeCopies
from megatron_ext.runtime.node_exchange import IN_FLIGHT, Arriving, NodeExchange
from megatron_ext.runtime.nvme_pool import NvmePool
from megatron_ext.runtime.program import Program
from megatron_ext.runtime.publisher import Publisher, Target, by_thread
from megatron_ext.runtime.routes.drive_copy import DriveCopy
from megatron_ext.runtime.routes.host_copy import HostCopy
from megatron_ext.workload.drive_reads import DriveReads


class Node:
    """One rank that publishes three groups to memory and drive."""

    def __init__(self, directory, nodes=None):
        self.clock, self.issuer, device = Clock(), Issuer(), HostDevice()
        self.groups = [RankGroup(index, "chunk 0", torch.full((1 << 12,), float(index)), 0, 1) for index in range(3)]
        targets = [Target(group, True, True, nodes=nodes) for group in self.groups]
        alone = lambda value: [value]
        sharers = [Sharers(self.groups, 0, 1, alone)]
        self.pool = HostPool(sharers, {0, 1, 2}, by_thread(targets), device)
        slots = dict(slots=1, slot_bytes=self.groups[0].bytes, settings=DriveReads(), device=device)
        self.nvme = NvmePool(directory, sharers, **slots)
        copies = NodeCopies(self.pool, self.nvme, device, self.issuer, self.clock)
        self.cpu, self.route, self.publisher = HostCopy(copies), DriveCopy(copies), Publisher(targets, copies)

    def publish(self) -> None:
        self.clock.version += 1
        self.publisher.updated(0, True)

    def close(self) -> None:
        self.publisher.close()
        for part in (self.route, self.nvme, self.cpu, self.pool):
            part.close()


def full(*_):
    raise OSError(errno.ENOSPC, "No space left on device")


def within(function, seconds: float = 100):
    """What ``function`` raises, on a thread that must end in time."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            function()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    assert not thread.is_alive(), "still waits"
    return raised[0] if raised else None


class SlowNetwork(NodeExchange):
    """An exchange whose shards, all its own, come when the test says so, or fail to."""

    def __init__(self):
        self.dp_ranks = (0,)
        self.works = []

    def begin(self, shards, dp_rank):
        self.works.append(Coming())
        return Arriving((self.works[-1],), (dp_rank,), tuple(shards))


class Coming:
    def __init__(self):
        self.come, self.error = threading.Event(), None

    def wait(self):
        assert self.come.wait(100)
        if self.error:
            raise self.error


def begun(network: SlowNetwork, count: int) -> int:
    """How many exchanges have begun, after waiting for ``count``, and a while for one too many."""
    deadline = time.monotonic() + 100
    while len(network.works) < count and time.monotonic() < deadline:
        time.sleep(0.001)
    time.sleep(0.05)
    return len(network.works)


def published(node: Node) -> list[int]:
    """Versions of the groups, by their flags."""
    return [node.pool.published(group)[0] for group in node.groups]


def test_the_next_exchange_begins_before_the_last_is_over(tmp_path):
    network = SlowNetwork()
    node = Node(tmp_path, network)
    node.publish()
    version, transfers = node.clock.version, [node.cpu.issue(group) for group in node.groups]
    assert begun(network, IN_FLIGHT) == IN_FLIGHT  # of three groups
    network.works[1].come.set()
    assert begun(network, IN_FLIGHT) == IN_FLIGHT and published(node) == [0, 0, 0]
    network.works[0].come.set()
    assert begun(network, 3) == 3
    for transfer in transfers[:2]:
        assert within(transfer.wait) is None
    assert published(node) == [version, version, 0]
    network.works[2].come.set()
    assert within(node.publisher.settled) is None
    assert published(node) == [version] * 3
    node.close()


def test_a_lost_counterpart_reaches_who_waits(tmp_path):
    network = SlowNetwork()
    node = Node(tmp_path, network)
    node.publish()
    transfer = node.cpu.issue(node.groups[0])
    assert begun(network, IN_FLIGHT) == IN_FLIGHT
    network.works[0].error = RuntimeError("Connection closed by peer")
    for work in network.works:
        work.come.set()
    assert "Connection closed" in str(within(node.publisher.settled))
    assert within(transfer.wait) is not None


def test_a_drive_that_fills_up_while_publishing_reaches_who_waits(tmp_path, monkeypatch):
    node = Node(tmp_path)
    monkeypatch.setattr(os, "pwrite", full)
    node.publish()
    node.route.stage_in(node.groups[0], 0)
    staged, copied = node.route.issue(node.groups[0]), node.cpu.issue(node.groups[1])
    assert isinstance(within(staged.wait), DriveError)
    assert isinstance(within(copied.wait), DriveError | None)  # a stream writes the host copy, without the drive
    assert "the drive is full" in str(within(node.publisher.settled))
    node.close()


@pytest.mark.parametrize("by_thread", [False, True])
def test_other_ranks_of_the_node_hear_that_one_cannot_publish(by_thread):
    """Two ranks of one process: the second one waits for a shard that the first one cannot write."""
    groups = [RankGroup(0, "chunk 0", torch.zeros(128), 0, 2)]
    given, everybody = threading.Barrier(2), {}

    def exchange_of(rank: int):
        count = 0

        def exchange(value):
            nonlocal count
            everybody[count, rank] = value
            given.wait()
            found = [everybody[count, other] for other in range(2)]
            count += 1
            given.wait()
            return found

        return exchange

    pools: dict[int, HostPool] = {}

    def make(rank: int) -> None:
        sharers = [Sharers(groups, rank, 2, exchange_of(rank))]
        pools[rank] = HostPool(sharers, {0}, {0} if by_thread else set(), HostDevice())

    threads = [threading.Thread(target=make, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    pools[1].flags[0, COPY][1].store(2)
    pools[0].fail(OSError("the drive is full"))
    clock, device, issuer = Clock(), HostDevice(), Issuer()
    clock.version = 2
    route = HostCopy(NodeCopies(pools[1], None, device, issuer, clock))
    arrival = route.issue(groups[0])
    assert isinstance(within(arrival.wait), PeerLost)
    route.close()
    for pool in pools.values():
        pool.close()


def test_a_pool_that_one_rank_cannot_open_is_refused_on_all(monkeypatch):
    groups = [RankGroup(0, "chunk 0", torch.zeros(128), 0, 2)]
    pid = os.getpid()
    answers = iter([[(pid, 10_000, (1, 1), None), (pid, None, False, None)], [None, "Permission denied"]])
    with pytest.raises(InputError, match="gpus_per_node: memory of process [0-9]+ cannot be shared: Permission denied"):
        HostPool([Sharers(groups, 0, 2, lambda value: next(answers))], {0}, set(), HostDevice())


@faults.injected(publish_delay_ms=300.0)
def test_closing_waits_for_what_is_being_written(tmp_path):
    before = set(threading.enumerate())
    node = Node(tmp_path)
    node.publish()
    node.close()
    assert set(threading.enumerate()) == before
    assert node.publisher.worker.submit(lambda transfer: None) is not None  # a closed worker takes, and does, nothing


def test_an_iteration_in_which_nobody_waited_for_a_group_is_no_iteration():
    """A module whose forward is never called, as under a replayed CUDA graph, waits for nothing."""
    group, clock = RankGroup(0, "chunk 0", torch.zeros(128), 0, 1), Clock()
    executor = Executor(Program(), {0: group}, clock, WholeBytes(), None, Issuer())
    group.unshard(lambda group: None, clock)
    with pytest.raises(ScheduleError, match="group 0 .* nothing waited for it"):
        executor.end_iteration()


def test_an_iteration_of_more_micro_batches_than_the_schedule_is_refused():
    program = Program(forwards=tuple((chunk, ()) for chunk in (0, 1, 0, 1)))
    executor = Executor(program, {}, Clock(), WholeBytes(), None, Issuer())
    executor.expect(2)
    with pytest.raises(ScheduleError, match="has 3 micro-batches, but the schedule has 2"):
        executor.expect(3)


def test_a_process_that_ends_without_closing_keeps_its_exit_code(tmp_path):
    """Threads that wait, copy or write when the interpreter ends must not abort it."""
    script = textwrap.dedent(f"""
        import sys, time
        sys.path[:0] = [{str(HELPERS)!r}, {str(Path(__file__).parent)!r}]
        from test_publishing import Node
        node = Node({str(tmp_path)!r})
        node.publish()
        node.clock.version += 5
        transfers = [node.cpu.issue(group) for group in node.groups]  # wait for a version that never comes
        time.sleep(0.2)
        sys.exit(7)
    """)
    for _ in some(range(3), 1):
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=240)
        assert done.returncode == 7, done.stderr[-500:]
