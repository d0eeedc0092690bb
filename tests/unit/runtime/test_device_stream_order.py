"""The order that our CUDA half asks of streams, on a stand-in that does no more than it was asked for.

Routes and publisher are the real ones, over memory and a real file; only torch.cuda is not. Each negative
control takes one wait away and has to be seen.
"""

import pytest
import torch
from late_device import LateDevice

from megatron_ext.runtime import device as devices
from megatron_ext.runtime.device import CudaDevice
from megatron_ext.runtime.faults import Faults
from megatron_ext.runtime.group import Clock, Group
from megatron_ext.runtime.host_pool import HostPool
from megatron_ext.runtime.node_exchange import NodeExchange
from megatron_ext.runtime.nvme_pool import NvmePool
from megatron_ext.runtime.publisher import Publisher, Target
from megatron_ext.runtime.routes import CpuRoute, NvmeRoute
from megatron_ext.runtime.worker import Transfer
from megatron_ext.workload.drive_reads import DriveReads

GROUPS, NUMEL, ITERATIONS = 3, 1 << 12, 4


def train(monkeypatch, directory, route: str, early: bool) -> list[float]:
    """Every group comes by ``route``, is read, and gets one more by the optimizer; what was read."""
    late, clock, device, faults = LateDevice(monkeypatch, early), Clock(), CudaDevice(torch.device("cuda", 0)), Faults()
    groups = [Group(index, "chunk 0", torch.zeros(NUMEL), 0, 1) for index in range(GROUPS)]
    masters = [
        torch.full((NUMEL,), 100.0 * index) for index in range(GROUPS)
    ]  # the optimizer's own; no group is like another
    pool = HostPool(groups, {*range(GROUPS)}, 0, 1, lambda value: [value])
    pool.pin(device)
    nvme = NvmePool(
        directory,
        groups,
        0,
        lambda value: [value],
        slots=1,
        slot_bytes=groups[0].bytes,
        settings=DriveReads(),
        device=device,
    )
    routes = {"cpu": CpuRoute(pool, device, clock, faults), "nvme": NvmeRoute(nvme, pool, device, clock, faults, 1)}
    assert len(late.pinned) == 2  # the pool as one region, and the staging slots
    publisher = Publisher(
        [Target(group, True, True) for group in groups], pool, nvme, NodeExchange(), 0, device, clock, faults
    )
    read: list[float] = []

    def step(group: Group, master: torch.Tensor) -> None:
        master.add_(1)
        group.shard.copy_(master)

    def forward(group: Group) -> None:
        read.append(group.whole[-1].item())
        group.whole.fill_(-1.0)  # whoever reads it again without a gather sees this

    for iteration in range(ITERATIONS):
        for group, master in zip(groups, masters):
            late.compute(lambda group=group, master=master: step(group, master))
        publisher.wait()
        clock.version += 1
        publisher.publish(iteration)
        publisher.wait()  # the shard is a part of what comes next: a run with one rank has nothing but its shard
        for group in groups:
            late.compute(lambda group=group: group.whole.fill_(-2.0))  # stale until it is gathered
        for group in groups:
            if route == "nvme":
                routes["nvme"].stage_in(group, 0)
            group.unshard(routes[route].issue, clock)
        for group in groups:
            group.wait(clock)
            late.compute(lambda group=group: forward(group))
            group.drop()
        pool.set_reads_done(iteration + 1)
    late.synchronize()
    publisher.close()
    for part in (routes["nvme"], nvme, routes["cpu"], pool):
        part.close()
    assert not late.pinned
    return read


WANTED = [100.0 * index + iteration + 1 for iteration in range(ITERATIONS) for index in range(GROUPS)]


@pytest.mark.parametrize("early", [False, True], ids=["late", "early"])
@pytest.mark.parametrize("route", ["cpu", "nvme"])
def test_every_wait_that_is_needed_is_there(monkeypatch, tmp_path, route, early):
    assert train(monkeypatch, tmp_path, route, early) == WANTED


def nothing(*args) -> None:
    return None


@pytest.mark.parametrize(
    ("route", "early", "cls", "method"),
    [
        ("cpu", False, devices.StreamWait, "wait"),  # compute does not wait for the copy
        ("cpu", False, CudaDevice, "synchronize"),  # published before it lies in host memory
        ("cpu", True, CudaDevice, "mark"),  # copied before compute has made way
        ("nvme", False, devices.StreamWait, "wait"),
        ("nvme", False, CudaDevice, "synchronize"),
        ("nvme", False, Transfer, "finished"),  # a slot filled anew while it is still copied from
        ("nvme", True, CudaDevice, "mark"),
    ],
)
def test_a_wait_that_is_missing_is_seen(monkeypatch, tmp_path, route, early, cls, method):
    monkeypatch.setattr(cls, method, nothing)
    assert train(monkeypatch, tmp_path, route, early) != WANTED
