"""The strict stand-in of a CUDA device sees what is dropped, or read, while a stream works on it."""

import io
import sys
from types import ModuleType

import pytest
import torch
import torch.distributed as dist
from happens_before import HappensBefore
from strict_collectives import Collectives
from strict_open import host_tensor, in_thread, judged, open_device, raced


def drop(how: str, host: torch.Tensor, side) -> None:
    """A tensor of the default stream's that a copy on another stream reads."""
    temporary = torch.ones(1000)
    with torch.cuda.stream(side):
        side.wait_stream(torch.cuda.default_stream())
        host.copy_(temporary, non_blocking=True)
    if how == "dropped when it is done":
        side.synchronize()
    if how == "waited for":
        torch.cuda.current_stream().wait_stream(side)
    kept = temporary[10:] if how == "a part is kept" else None
    del temporary
    torch.ones(10)
    assert kept is None or kept.sum() == 990


@pytest.mark.parametrize("order", ["late", "early"])
@pytest.mark.parametrize("how", ["dropped", "waited for", "dropped when it is done", "a part is kept"])
def test_a_tensor_that_is_dropped_while_another_stream_reads_it(order, how):
    with open_device(order=order) as device:
        host, side = host_tensor(1000), torch.cuda.Stream()
        drop(how, host, side)
        torch.cuda.synchronize()
    assert host.sum() == 1000 and raced(device) == ([["allocation", "copy_"]] if how == "dropped" else [])


def test_a_tensor_of_another_stream_is_dropped_while_compute_reads_it():
    with open_device() as device:
        with torch.cuda.stream(torch.cuda.Stream()) as _:
            made, event = torch.ones(1000), torch.cuda.Event()
            event.record()
        event.wait()
        made.sum()
        del made
    with device.engine.changed:
        assert not device.engine.queue
    assert judged(device).races == set(), "nothing is allocated on the stream any more"
    with open_device() as device:
        side = torch.cuda.Stream()
        for _ in range(2):
            with torch.cuda.stream(side):
                made, event = torch.ones(1000), torch.cuda.Event()
                event.record()
            event.wait()
            made.sum()
            del made
    assert raced(device) == [["allocation", "sum"]]


def test_an_empty_part_of_memory_is_not_new():
    with open_device() as device:
        whole, nothing = torch.ones(10), torch.ones(0)
        with torch.cuda.stream(torch.cuda.Stream()):
            whole[10:].copy_(nothing)
        assert device.memory.place(whole, "")[0][3] == "default stream"


@pytest.mark.parametrize("waits", [True, False])
def test_an_array_is_read_as_long_as_it_is_there(waits):
    with open_device() as device:
        memory, side = host_tensor(10).fill_(1), torch.cuda.Stream()
        array = memory.numpy()
        with torch.cuda.stream(side):
            memory.copy_(torch.ones(10), non_blocking=True)
        if waits:
            side.synchronize()
        assert array.sum() == 10
        del array
    assert raced(device) == ([] if waits else [["copy_", "the"]])


@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize("read", [lambda tensor: torch.save(tensor, io.BytesIO()), lambda tensor: tensor.numpy().sum()])
def test_a_copy_to_the_host_that_is_not_waited_for(waits, read):
    with open_device() as device:
        copied = torch.ones(10).to("cpu", non_blocking=True)
        if waits:
            torch.cuda.synchronize()
        read(copied)
        assert not waits or copied.sum() == 10
    races = raced(device)
    assert not races if waits else races and all("copy_" in race for race in races)


def test_a_copy_to_the_host_that_waits_is_the_processors():
    with open_device() as device:
        for copied in (torch.ones(10).to("cpu"), torch.ones(10).to("cpu", torch.float64, copy=True)):
            copied.add_(1)
            assert copied.numpy().sum() == 20
        assert torch.ones(10).to(torch.bfloat16).to("cuda").dtype is torch.bfloat16
    assert judged(device).races == set() and device.engine.errors == []


def test_what_is_saved_of_the_device_has_been_computed():
    with open_device() as device:
        with torch.cuda.stream(side := torch.cuda.Stream()):
            made = torch.zeros(10)
            made.add_(1)
        torch.save(made, io.BytesIO())
        torch.cuda.current_stream().wait_stream(side)
        torch.save(made, file := io.BytesIO())
    file.seek(0)
    assert torch.load(file).sum() == 10
    assert ["add_", "torch.save"] in raced(device)


@pytest.mark.parametrize("waits", [True, False])
def test_a_scalar_is_read_as_a_kernel_is_launched(waits):
    with open_device() as device:
        scalar, side, result = host_tensor(1)[0], torch.cuda.Stream(), torch.ones(10)
        with torch.cuda.stream(side):
            scalar.copy_(torch.tensor(3.0), non_blocking=True)  # the stream's order is of no use
            if waits:
                side.synchronize()
            result.mul_(scalar)
        scalar.zero_()
        torch.cuda.synchronize()
    assert not waits or result.sum() == 30
    races = [race for race in raced(device) if "mul_" in race]
    assert races == ([] if waits else [["copy_", "mul_"]])


@pytest.mark.parametrize("waits", [True, False])
def test_page_locked_memory_of_torchs_is_dropped_while_a_kernel_reads_it(monkeypatch, waits):
    module = ModuleType("uses_kernels")
    module.multi_tensor_applier = lambda op, noop, lists, *args: op(0, noop, lists, *args)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    add = lambda chunk, noop, lists: lists[1][0].add_(lists[0][0])
    with open_device() as device:
        there = torch.ones(10)
        own = device.memory.to_host(torch.empty(10), locked=True)
        module.multi_tensor_applier(add, None, [[own], [there]])
        if waits:
            torch.cuda.synchronize()
        del own
        torch.cuda.synchronize()
    assert raced(device) == ([] if waits else [["kernel", "page-locked"]])


class Done:
    """The work of a collective that has ended."""

    def wait(self, *_) -> None:
        """It has."""


@pytest.mark.parametrize("waits", [True, False])
def test_a_message_is_received_when_it_has_been_waited_for(monkeypatch, waits):
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: [0, 1])
    monkeypatch.setattr(dist, "get_rank", lambda group: 0)
    logs, group = [], type("Group", (), {"group_name": "pipeline"})()
    for rank, name in enumerate(("send", "recv")):
        with open_device(rank=rank) as device:
            message = Collectives(device).collective(name, lambda *_: Done())
            tensor = torch.ones(10)
            handle = message(group, [tensor], 1 - rank, 0)
            if waits or rank == 0:
                handle.wait()
            tensor.add_(1)
        logs.append(device.engine.entries)
    judgement = HappensBefore(logs)
    assert judgement.stuck == {}
    assert [sorted(label.split()[0] for label in race) for race in judgement.races] == (
        [] if waits else [["add_", "recv"]]
    )


@pytest.mark.parametrize(("name", "raced"), [("broadcast", True), ("allreduce", False)])
def test_who_sends_to_all_does_not_wait_for_them(name, raced):
    """The root's next work may come before the others' last."""
    logs = []
    for rank in range(2):
        thread, sources = (rank, "thread"), (0,) if name == "broadcast" else ()
        meeting = (thread, "collective", "one", rank, 2, *sources)
        access = (thread, "access", f"rank {rank}", [("shared", 0, 1, True)])
        logs.append([access, meeting] if rank else [meeting, access])
    assert bool(HappensBefore(logs).races) == raced


def test_threads_may_drop_what_others_used():
    with open_device() as device:
        host, side, held = host_tensor(1000), torch.cuda.Stream(), [torch.ones(1000)]
        with torch.cuda.stream(side):
            side.wait_stream(torch.cuda.default_stream())
            host.copy_(held[0], non_blocking=True)
        in_thread(held.clear).join()
        torch.ones(10)
        torch.cuda.synchronize()
    assert raced(device) == [["allocation", "copy_"]]
