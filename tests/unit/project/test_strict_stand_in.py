"""The strict stand-in of a CUDA device sees what a GPU showed; see tests/helpers/strict_device.py."""

import contextlib
import ctypes
import sys
import threading
import time
from types import ModuleType

import pytest
import torch
from happens_before import HappensBefore, said
from strict_collectives import Collectives
from strict_device import StrictDevice
from strict_engine import LAUNCHES, ONE_QUEUE
from strict_open import host_tensor, in_thread, judged, open_device, raced
from strict_streams import OFFSET

from megatron_ext.runtime.device import device_of
from megatron_ext.runtime.shards_on_host import HostShards


def scale(chunk, noop, lists, factor):
    for source, destination in zip(*lists):
        destination.copy_(source * factor)


@pytest.fixture
def multi_tensor_applier(monkeypatch):
    """As a module of Megatron's imports it; look it up in the module that is returned."""
    module = ModuleType("uses_kernels")
    module.multi_tensor_applier = lambda op, noop, lists, *args: op(0, noop, lists, *args)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module


@pytest.mark.parametrize("ordered", [True, False])
def test_a_kernel_on_page_locked_memory_races_the_processor(multi_tensor_applier, ordered):
    with open_device() as device:
        gradient, copy = host_tensor(1000).fill_(1), host_tensor(1000)
        multi_tensor_applier.multi_tensor_applier(scale, None, [[gradient], [gradient]], 0.5)
        if ordered:
            torch.cuda.current_stream().synchronize()
        copy.copy_(gradient)
    assert copy[0] == (0.5 if ordered else 1), "the kernel does not run late"
    (race,) = judged(device).races or [None]
    assert (race is None) == ordered
    assert ordered or sorted(label.split()[0] for label in race) == ["copy_", "kernel"]


def test_a_kernel_is_refused_pageable_memory(multi_tensor_applier):
    with open_device() as device:
        gradient = host_tensor(10, locked=False)
        multi_tensor_applier.multi_tensor_applier(scale, None, [[gradient], [gradient]], 0.5)
        torch.cuda.synchronize()
    assert "not page-locked" in device.engine.errors[0]


def recorded_event():
    event = torch.cuda.Event()
    event.record()
    return event


CALLS = {
    "Event.record": recorded_event,
    "torch.cuda.Stream()": torch.cuda.Stream,
    "cudaHostRegister": lambda: host_tensor(10),
    "torch.cuda.synchronize": lambda: torch.cuda.synchronize(),
    "add": lambda: DEVICE_TENSOR + DEVICE_TENSOR,
    "_local_scalar_dense": lambda: DEVICE_TENSOR[0].item(),
}
DEVICE_TENSOR = torch.ones(4)


@pytest.mark.parametrize("name", CALLS)
def test_only_the_issuer_calls_the_driver(name):
    call = (lambda: torch.cuda.Stream()) if "Stream" in name else CALLS[name]
    with open_device() as device:
        call()
        assert device.engine.misplaced == []
        in_thread(call).join()
    assert any(text.startswith(name) and "thread other" in text for text in device.engine.misplaced)


def test_a_thread_may_compute_in_host_memory():
    with open_device() as device:
        memory = host_tensor(10)
        in_thread(lambda: memory.add_(torch.ones(10)).mul_(2)).join()
    assert device.engine.misplaced == device.engine.errors == [] and memory.sum() == 20


def test_an_event_that_dies_on_another_thread_is_seen():
    with open_device() as device:
        held = [recorded_event()]
        in_thread(held.clear).join()
    assert "freeing an event" in device.engine.misplaced[0]


def test_a_backward_is_run_by_a_thread_that_may_call_the_driver():
    with open_device() as device:
        product, callers = DEVICE_TENSOR.clone().requires_grad_() * 2, []
        product.register_hook(lambda gradient: callers.append((threading.get_ident(), recorded_event())))
        torch.autograd.backward(product.sum())
        assert [caller for caller, _ in callers] != [threading.get_ident()]
        product.register_hook(lambda gradient: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            torch.autograd.backward(product.mean())
        torch.cuda.Stream()
    assert device.engine.misplaced == device.engine.errors == []


def test_an_asynchronous_copy_with_gaps_goes_through_other_memory():
    with open_device() as device:
        torch.zeros(5).copy_(host_tensor(10)[::2], non_blocking=True)
        torch.cuda.synchronize()
    assert "pageable" in device.engine.errors[0]


class Flag:
    """8 bytes, stored by threads and waited for by streams."""

    def __init__(self, device: StrictDevice):
        self._device, self.memory = device, host_tensor(2)
        self.address = self.memory.data_ptr()
        self._word = ctypes.c_int64.from_address(self.address)

    def store(self) -> None:
        self._device.engine.log(("store", self._device.memory.name_of(self.address), 1))
        self._word.value = 1

    def queue_wait(self) -> None:
        from cuda.bindings import driver

        stream = torch.cuda.current_stream()
        driver.cuStreamWaitValue64(stream.cuda_stream, self.address + OFFSET, 1, 0)


@pytest.mark.parametrize("unlucky", [True, False])
def test_a_wait_in_the_driver_for_a_thread_that_frees_an_event_is_a_circle(unlucky):
    """W2: seen as it stops a run, and where this run had luck."""
    with open_device() as device:
        flag, held = Flag(device), [recorded_event()]

        def free_and_store() -> None:
            while unlucky and device.engine.lock._holder is None:
                time.sleep(0.001)
            held.clear()
            flag.store()

        other = in_thread(free_and_store)
        if not unlucky:
            time.sleep(0.05)
        flag.queue_wait()
        DEVICE_TENSOR.cpu()
        other.join()
    stopped = device.engine.lock.circles
    assert len(stopped) == unlucky
    for text in stopped:
        assert "copy_" in text and "freeing an event" in text and text.count("test_strict_stand_in.py") >= 2
    texts = [said(circle, device.engine.stacks) for circle in judged(device).circles]
    assert any("freeing an event" in text and "thread other" in text for text in texts)


def test_a_thread_that_only_stores_a_flag_is_no_circle():
    with open_device() as device:
        flag = Flag(device)
        other = in_thread(lambda: (time.sleep(0.02), flag.store()))
        flag.queue_wait()
        assert DEVICE_TENSOR[0].item() == 1
        other.join()
    assert judged(device).circles == device.engine.lock.circles == []


def test_an_allocation_keeps_the_interpreter_from_the_thread_that_stores_a_flag():
    with open_device() as device:
        flag, storage = Flag(device), torch.ones(1000).untyped_storage()
        storage.resize_(0)
        storage.resize_(4000)  # the block that was freed
        assert judged(device).circles == []
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            flag.queue_wait()
        other = in_thread(lambda: (time.sleep(0.05), flag.store()))
        torch.ones(2000).untyped_storage().resize_(16000)
        other.join()
    (circle,) = judged(device).circles
    assert "resize_" in circle.call and "store of flag" in circle.needs


@pytest.mark.parametrize(("numel", "done"), [(10, True), (1_000_000, False)])
def test_a_large_copy_loses_where_a_small_one_wins(numel, done):
    with open_device(order="early", bytes_per_second=1e7) as device:
        source, event = host_tensor(numel), torch.cuda.Event()
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.zeros(numel).copy_(source, non_blocking=True)
            event.record()
        time.sleep(0.05)
        assert event.query() == done
        device.engine.errors.clear()


@pytest.mark.parametrize("late", [False, True])
def test_memory_that_is_taken_within_an_iteration_is_seen(late):
    with open_device() as device:
        own = device_of(torch.zeros(1))
        device.memory.begun = device.memory.in_steps = late
        own.host_tensor(10, torch.uint8)
        own.host_tensor(10, torch.uint8)  # unlocks the one before, which nobody uses
        HostShards(10, torch.float32, torch.device("cpu"), own)
    kinds = {"page-locked memory", "the end of page-locking", "device memory of empty"} if late else set()
    assert {text.partition(" within an iteration, at ")[0] for text in device.engine.errors} == kinds


def lock_twice() -> None:
    memory = host_tensor(1000)
    torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)


def lock_a_part() -> None:
    memory = host_tensor(1000, locked=False)
    torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), 400, 0)
    torch.zeros(1000).copy_(memory, non_blocking=True)


def wait_for_a_flag_that_is_not_locked() -> None:
    from cuda.bindings import driver

    memory = host_tensor(1000, locked=False)
    assert driver.cuMemHostGetDevicePointer(memory.data_ptr(), 0)[0] != 0
    driver.cuStreamWriteValue64(torch.cuda.Stream().cuda_stream, memory.data_ptr() + OFFSET, 1, 0)
    torch.cuda.synchronize()


def unlock_what_is_not_locked() -> None:
    memory = host_tensor(10, locked=False)
    torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())


WRONG = {
    "page-locked twice": lock_twice,
    "pageable memory": lock_a_part,
    "unlocked that is not page-locked": unlock_what_is_not_locked,
    "is given back": lambda: host_tensor(10).fill_(1) is None,
    "which is not page-locked": wait_for_a_flag_that_is_not_locked,
}


@pytest.mark.parametrize("said", WRONG)
def test_memory_is_locked_once_and_as_long_as_it_is_needed(said):
    with open_device() as device:
        WRONG[said]()
    assert any(said in error for error in device.engine.errors)


def test_flags_are_unlocked_when_no_stream_needs_them():
    with open_device() as device:
        memory, stream = host_tensor(1000), torch.cuda.Stream()
        from cuda.bindings import driver

        driver.cuStreamWriteValue64(stream.cuda_stream, memory.data_ptr() + OFFSET, 1, 0)
        torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())
        torch.cuda.synchronize()
    ((flag, end),) = judged(device).races
    assert flag.startswith("flag") and end.startswith("cudaHostUnregister")


@pytest.mark.parametrize("timed", [True, False])
def test_times_are_those_of_timed_events_that_have_come(timed):
    with open_device():
        begin, end = (torch.cuda.Event(enable_timing=timed) for _ in range(2))
        with torch.cuda.stream(torch.cuda.Stream()):
            begin.record()
            end.record()
        with pytest.raises(RuntimeError, match="completed"):
            begin.elapsed_time(end)
        end.synchronize()
        with contextlib.nullcontext() if timed else pytest.raises(RuntimeError, match="timed"):
            assert begin.elapsed_time(end) >= 0


def test_a_block_goes_back_to_the_stream_that_it_was_taken_for():
    with open_device() as device:
        default, reading, giving_back = torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.Stream()
        tensor, other = torch.ones(1000), torch.ones(1000)
        for one in (other, tensor):
            one.untyped_storage().resize_(0)
        tensor.untyped_storage().resize_(4000)
        reading.wait_stream(default)
        with torch.cuda.stream(reading):
            host_tensor(1000).copy_(tensor, non_blocking=True)
        with torch.cuda.stream(giving_back):
            tensor.untyped_storage().resize_(0)
        other.untyped_storage().resize_(4000)
    assert raced(device) == [["allocation", "copy_"]]


def test_the_processor_reads_what_becomes_a_list():
    with open_device() as device:
        memory = host_tensor(10)
        with torch.cuda.stream(torch.cuda.Stream()):
            memory.copy_(torch.ones(10), non_blocking=True)
        memory.tolist()
    assert raced(device) == [["copy_", "tolist"]]


def test_every_dtype_has_kernels_of_its_own(multi_tensor_applier):
    with open_device() as device:
        for dtype in (torch.float32, torch.bfloat16, torch.float32):
            one = torch.ones(4, dtype=dtype)
            one.add_(one)
            multi_tensor_applier.multi_tensor_applier(scale, None, [[one], [one]], 0.5)
    said = [entry[3].partition(" at ")[0] for entry in device.engine.entries if entry[1] == "sync"]
    assert len([one for one in said if "first launch of add_" in one]) == 2
    assert len([one for one in said if "first launch of scale" in one]) == 2


def test_a_launch_waits_while_the_queue_of_its_stream_is_full():
    """Whoever gives a stream more than it takes, before the store that it waits for, waits for ever."""
    with StrictDevice(0, 0, "early", stuck_seconds=0.3) as device:
        flag, stream = Flag(device), torch.cuda.Stream()
        with torch.cuda.stream(stream):
            flag.queue_wait()
            for _ in range(LAUNCHES - 1):
                torch.cuda.Event().record()
            with pytest.raises(RuntimeError, match="does not get on"):
                torch.cuda.Event().record()
        flag.store()


class Held:
    """The work of a collective to which another rank does not come."""

    def wait(self, *_) -> None:
        time.sleep(2)


@pytest.mark.parametrize(("order", "blocks"), [("late", False), (ONE_QUEUE, True)])
def test_in_one_queue_nothing_passes_a_collective(monkeypatch, order, blocks):
    monkeypatch.setattr(Collectives, "meeting", lambda own, group: ("collective", "one", 0, 1))
    with StrictDevice(0, 0, order, stuck_seconds=0.3) as device:
        reduce = Collectives(device).collective("allreduce", lambda *_: Held())
        with pytest.raises(RuntimeError, match="does not get on") if blocks else contextlib.nullcontext():
            reduce(object(), [DEVICE_TENSOR])


def test_a_communicator_begins_its_collectives_as_they_are_issued(monkeypatch):
    """Also if the stream of the first is late; otherwise ranks could begin them in different orders, and hang."""
    monkeypatch.setattr(Collectives, "meeting", lambda own, group: ("collective", "one", 0, 1))
    begun, group = [], object()
    with StrictDevice(0, 0, "late") as device:
        collectives = Collectives(device)
        for number, stream in enumerate((torch.cuda.Stream(), None)):
            issue = collectives.collective("allreduce", lambda *_, number=number: begun.append(number) or Held())
            with torch.cuda.stream(stream):
                issue(group, [DEVICE_TENSOR])
    assert begun == [0, 1]


@pytest.mark.parametrize(
    ("orders", "crossed"), [(("ab", "ab"), ""), (("ab", "ba"), "ab"), (("ab", "bc", "ca"), "abc"), (("cab", "ab"), "")]
)
def test_collectives_that_ranks_issue_in_different_orders_are_seen(orders, crossed):
    """Streams and waits would let them get on; kernels that fill a device, or its one queue, would not."""
    logs = [
        [((rank, "thread"), "issue", (rank, name), ("collective", name, rank, sum(name in own for own in orders)))]
        for rank, order in enumerate(orders)
        for name in order
    ]
    logs = [[entry for (entry,) in logs if entry[0][0] == rank] for rank in range(len(orders))]
    judgement = HappensBefore(logs)
    assert judgement.stuck == {} and "".join(judgement.crossed) == crossed
