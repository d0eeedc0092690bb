"""Threads of the host: its copies, casts, additions and steps take all that they may, and each rank its share of the
processors beside its GPU."""

import os
import time
from types import SimpleNamespace

import pytest
import torch

from megatron_ext.runtime import cgroups, host_threads
from megatron_ext.runtime.machine import environment

NUMEL, TIMES = 1 << 22, 12
"""16 MB in fp32: far more than torch gives to one thread alone."""

TRIES = 8


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def share_of_others(operation) -> tuple[float, float]:
    """The share of the processor time of ``operation`` that other threads than this one take.

    The least and the largest of some tries: while other programs have the processors, this thread waits for its
    threads, and such waits count as its own time.
    """
    operation()
    shares = []
    while len(shares) < TRIES and max(shares, default=0.0) < 0.4:
        begin = time.process_time(), time.thread_time()
        for _ in range(TIMES):
            operation()
        spent = time.process_time() - begin[0], time.thread_time() - begin[1]
        shares.append(1 - spent[1] / spent[0])
    return min(shares), max(shares)


@pytest.mark.parametrize("number", [2, 1])
def test_no_thread_works_alone_where_there_are_two(threads, number):
    threads(number)
    wide, half = torch.ones(NUMEL), torch.ones(NUMEL, dtype=torch.bfloat16)
    other = torch.ones(NUMEL)
    parameter = torch.ones(NUMEL)
    parameter.grad = other
    step = torch.optim.AdamW([parameter], fused=True).step
    shares = {
        "copy": share_of_others(lambda: wide.copy_(other)),
        "cast": share_of_others(lambda: half.copy_(wide)),
        "add": share_of_others(lambda: wide.add_(other)),
        "clip": share_of_others(lambda: torch.mul(wide, 0.5, out=other)),
        "step": share_of_others(step),
    }
    assert all(most > 0.3 if number == 2 else least < 0.2 for least, most in shares.values()), shares


DEVICE = torch.device("cuda", 0)


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Two NUMA nodes of four processors; the GPU is beside node 1. Gives the affinity of each thread."""
    bound = dict.fromkeys((os.getpid(), 7), set(range(8)))
    (tmp_path / "sys/devices/system/node").mkdir(parents=True)
    (tmp_path / "sys/devices/system/node/online").write_text("0-1\n")
    for node, own in ((0, "0-3"), (1, "4-6,7")):
        (tmp_path / f"sys/devices/system/node/node{node}").mkdir()
        (tmp_path / f"sys/devices/system/node/node{node}/cpulist").write_text(own + "\n")
    for thread in bound:
        (tmp_path / f"task/{thread}").mkdir(parents=True)
    gpu = tmp_path / "sys/bus/pci/devices/0000:81:00.0"
    gpu.mkdir(parents=True)
    (gpu / "numa_node").write_text("1\n")
    monkeypatch.setattr(host_threads, "SYSTEM", tmp_path / "sys")
    monkeypatch.setattr(host_threads, "before_binding", [])
    monkeypatch.setattr(host_threads, "THREADS", tmp_path / "task")
    properties = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x81, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(os, "cpu_count", lambda: 128)
    monkeypatch.setattr(os, "sched_getaffinity", lambda thread: bound[thread or os.getpid()])
    monkeypatch.setattr(os, "sched_setaffinity", lambda thread, own: bound.update({thread: own}))
    return SimpleNamespace(bound=bound, properties=properties, sys=tmp_path / "sys", gpu=gpu)


def test_all_threads_run_beside_the_gpu(machine):
    assert host_threads.numa_node(DEVICE) == 1 and host_threads.numa_nodes() == 2
    host_threads.bind(1)
    assert set(map(frozenset, machine.bound.values())) == {frozenset({4, 5, 6, 7})}


def test_a_table_holds_for_the_processors_that_a_rank_had_before_it_was_bound(machine):
    """`measure` does not bind its ranks."""
    assert environment("cpu")["hardware"]["processors"] == 8
    for _ in range(2):  # for each chunk of the model
        host_threads.bind(1)
        assert host_threads.processors() == 4 and environment("cpu")["hardware"]["processors"] == 8


def test_who_is_bound_elsewhere_stays_there(machine):
    machine.bound[os.getpid()] = {0, 1}
    host_threads.bind(1)
    host_threads.bind(None)
    host_threads.bind(9)  # not there
    assert machine.bound[os.getpid()] == {0, 1}


def test_a_machine_that_does_not_say_is_left_alone(machine):
    (machine.gpu / "numa_node").write_text("-1\n")
    assert host_threads.numa_node(DEVICE) is None
    del machine.properties.pci_domain_id  # an older torch
    assert host_threads.numa_node(DEVICE) is None
    (machine.sys / "devices/system/node/online").write_text("0\n")
    assert host_threads.numa_node(DEVICE) is None


@pytest.mark.parametrize(
    ("before", "ranks", "threads", "line"),
    [
        (1, 1, 7, "the host adds gradients and steps with 7 threads per rank, not with 1 as torch would by"),
        (1, 2, 4, "the host adds gradients and steps with 4 threads per rank, not with 1 as torch would by"),
        (8, 1, None, None),
        (4, 2, None, None),
        # A share of all cores, while both ranks are bound to the cores of one NUMA node.
        (7, 2, 4, "the host adds gradients and steps with 4 threads per rank, not with 7 as torch would by"),
        (1, 16, None, "16 ranks share 8 processors: adding gradients and stepping on the host takes up to 2.0 times"),
    ],
)
def test_threads_are_the_ranks_share(machine, monkeypatch, before, ranks, threads, line):
    given = []
    monkeypatch.setattr(torch, "get_num_threads", lambda: before)
    monkeypatch.setattr(torch, "set_num_threads", given.append)
    lines = host_threads.use(ranks, ranks)
    assert given == ([] if threads is None else [threads])
    assert [own[: len(line or "")] for own in lines] == ([] if line is None else [line])


def test_ranks_of_a_node_share_the_processor_time_of_their_container(machine, monkeypatch):
    """Also where they run on processors of their own: 2 of the node's 8 ranks on these 8 processors."""
    monkeypatch.setattr(cgroups, "processor_quota", lambda number: min(number, 12))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 9)
    assert host_threads.of_rank(2, 8) == 1 and host_threads.of_rank(2, 2) == 4
    assert host_threads.use(4, 24)[0].startswith("4 ranks share 2 processors")
    assert host_threads.use(2, 32)[0].startswith("2 ranks share 1 processors")  # less than one is theirs


def test_threads_that_make_pages_know_the_launchers_ranks(machine, monkeypatch):
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert host_threads.share() == 8
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    assert host_threads.share() == 2
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "99")
    assert host_threads.share() == 1
