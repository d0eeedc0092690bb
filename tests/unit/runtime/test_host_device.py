"""Streams of a machine without a GPU: work in its order, and waits for what an event was when they were issued."""

import threading

import pytest
import torch

from megatron_ext.runtime.device import HostDevice
from megatron_ext.runtime.flags import private_flags
from megatron_ext.runtime.host_device import HostCompute, HostEvent, HostStream
from megatron_ext.runtime.issuer import Issuer
from megatron_ext.runtime.streams import Arrival


@pytest.fixture
def streams():
    made = [HostStream("first"), HostStream("second")]
    yield made
    for one in made:
        one.close()


def test_work_is_done_in_the_order_in_which_it_is_given(streams):
    done, (stream, _) = [], streams
    (flag,) = private_flags(1, HostDevice())
    memory = torch.zeros(4)
    stream.run(lambda: done.append(flag.load()))
    stream.store(flag, 3)
    stream.copy(memory, torch.ones(4))
    stream.run(lambda: done.append((flag.load(), float(memory[0]))))
    stream.record(HostEvent()).synchronize()
    assert done == [0, (3, 1.0)]


def test_who_gives_work_does_not_wait_for_it(streams):
    go_on, (stream, _) = threading.Event(), streams
    stream.run(lambda: go_on.wait(10))
    event = stream.record(HostEvent())
    assert event.mark is not None and not event.mark.ended
    go_on.set()
    event.synchronize()


def test_a_stream_waits_for_an_event_of_another_one(streams):
    go_on, done, (first, second) = threading.Event(), [], streams
    first.run(lambda: go_on.wait(10))
    event = first.record(HostEvent())
    second.wait(event)
    second.run(lambda: done.append("behind"))
    end = second.record(HostEvent())
    assert not end.mark.ended and done == []
    go_on.set()
    end.synchronize()
    assert done == ["behind"]


def test_a_wait_is_for_what_the_event_was_when_it_was_issued(streams):
    """Recorded again, the event is another point; what waits already does not wait for that."""
    never, done, (first, second) = threading.Event(), [], streams
    event = first.record(HostEvent())
    second.wait(event)
    first.run(lambda: never.wait(10))
    first.record(event)
    second.run(lambda: done.append("went on"))
    second.record(HostEvent()).synchronize()
    assert done == ["went on"] and not event.mark.ended
    never.set()


def test_an_event_that_was_never_recorded_and_no_event_are_waited_for_by_nobody(streams):
    for stream in (*streams, HostCompute()):
        stream.wait(None)
        stream.wait(HostEvent())
    HostEvent().synchronize()
    assert HostCompute().record(HostEvent()).mark is None


def test_a_stream_waits_for_a_flag_that_another_one_stores(streams):
    done, (first, second) = [], streams
    (flag,) = private_flags(1, HostDevice())
    second.wait_flag(flag, 2, lambda: None)
    second.run(lambda: done.append(flag.load()))
    first.store(flag, 1)
    first.record(HostEvent()).synchronize()
    assert done == []
    first.store(flag, 2)
    second.record(HostEvent()).synchronize()
    assert done == [2]


def test_an_error_reaches_who_waits_for_what_comes_behind_it(streams):
    first, second = streams
    first.run(lambda: 1 / 0)
    second.wait(first.record(HostEvent()))
    for event in (first.record(HostEvent()), second.record(HostEvent())):
        with pytest.raises(ZeroDivisionError):
            event.synchronize()
        with pytest.raises(ZeroDivisionError):
            HostCompute().wait(event)


def test_copies_do_not_cast(streams):
    """torch would do it through memory that is not page-locked."""
    for stream in (*streams, HostCompute()):
        with pytest.raises(AssertionError):
            stream.copy(torch.zeros(4), torch.zeros(4, dtype=torch.bfloat16))


def test_the_compute_stream_waits_for_a_transfer_that_is_still_to_be_issued(streams):
    """As its issuer issues it, and then for the transfer itself."""
    issuer, device, (stream, _) = Issuer(), HostDevice(), streams
    arrival, ready, memory = Arrival(device, issuer), threading.Event(), torch.zeros(4)
    for value in (1.0, 2.0):  # the same object, transfer after transfer
        ready.clear()
        arrival.begin()

        def issue(value=value) -> None:
            stream.wait(arrival.taken)
            stream.copy(memory, torch.full((4,), value))
            arrival.end(stream)

        issuer.when(ready.is_set, issue)
        assert not arrival.issued
        threading.Timer(0.02, ready.set).start()
        arrival.wait()
        assert memory.tolist() == [value] * 4
