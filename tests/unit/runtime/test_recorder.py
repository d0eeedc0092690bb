"""What is recorded of a device lies where its stream was, and of the thread where the clock was. Events are a
stand-in."""

import contextlib
import time
from types import SimpleNamespace

import numpy
import pytest
import torch

from megatron_ext.runtime.host_device import HostStream
from megatron_ext.runtime.recorder import Recorder, log_of
from megatron_ext.runtime.streams import CudaStream


class Event:
    """Every event is 10 ms behind the one before it, whenever it is recorded."""

    count = 0

    def __init__(self, enable_timing: bool = False):
        assert enable_timing, "elapsed_time needs it"

    def record(self) -> None:
        Event.count += 1
        self.ms = 10.0 * Event.count

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, later: "Event") -> float:
        return later.ms - self.ms


@pytest.fixture
def on_device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    return Recorder(0, on_device=True)


def test_waits_and_compute_are_the_devices_and_issuing_is_the_threads(on_device):
    began = time.perf_counter()
    on_device.timed("wait", "wait 0", lambda: None)()
    on_device.timed("issue", "unshard 0", lambda: time.sleep(0.002))()
    most_us = (time.perf_counter() - began) * 1e6  # more than 2 ms where the machine is busy
    start = on_device.now()
    on_device.add("compute", "F", start, on_device.now())
    wait, issue, compute = on_device.events()
    assert wait.duration_us == pytest.approx(10e3) and compute.duration_us == pytest.approx(10e3)
    assert compute.start_us - wait.start_us == pytest.approx(20e3, abs=1)  # of floats since the epoch
    assert 2e3 <= issue.duration_us <= most_us
    # Both since the epoch: the first event is 10 ms behind the base.
    assert abs(wait.start_us - 10e3 - issue.start_us) < 3e3 + most_us


def test_durations_stay_exact_when_training_is_long(on_device, monkeypatch):
    """The time between two events is a float32, as CUDA's is: after ten hours it would be 4 ms coarse."""
    monkeypatch.setattr(Event, "elapsed_time", lambda self, later: float(numpy.float32(later.ms - self.ms)))
    first = on_device.now()
    on_device.add("wait", "first", first, first)
    for _ in range(3600):
        Event.count += 1000  # 10 s
        on_device.begin_iteration()
    start, end = on_device.now(), on_device.now()
    end.ms = start.ms + 0.125
    on_device.add("wait", "wait 0", start, end)
    begin, wait = on_device.events()
    assert wait.duration_us == 125.0
    assert wait.start_us - begin.start_us == pytest.approx(1e3 * (start.ms - first.ms), abs=10)


def test_without_a_device_all_is_by_the_clock():
    recorder = Recorder(0)
    began = time.perf_counter()
    recorder.timed("wait", "wait 0", lambda: time.sleep(0.002))()
    most_us = (time.perf_counter() - began) * 1e6
    assert isinstance(recorder.now(), int) and 2e3 <= recorder.events()[0].duration_us <= most_us


def test_a_copy_says_when_it_was_under_way(on_device, monkeypatch):
    monkeypatch.setattr(torch.cuda, "Stream", lambda device, priority: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    on_device.now()  # as the training thread does
    by_the_clock, host = Recorder(0), HostStream("test")
    for stream, recorder in ((CudaStream(torch.device("cuda", 0), None), on_device), (host, by_the_clock)):
        copied = torch.zeros(4)
        stream.copy(copied, torch.ones(4))  # nobody wants to know
        stream.log = log_of(recorder, "gather", "to_device", "cpu", "parameters")
        stream.copy(copied, torch.zeros(4))
        stream.copy(copied, torch.ones(4), "unshard 3")
        stream.copy(copied, torch.ones(4), None)  # counted alone
        if stream is host:
            stream.close()
        found = [event for event in recorder.events() if event.lane == "cpu"]
        assert copied.all() and [event.name for event in found] == ["parameters", "unshard 3"]
        assert all(event.duration_us == 10e3 if stream is not host else event.duration_us >= 0 for event in found)
        recorder.end_count()
        assert recorder.counted[0] == {"gather": {"to_device": 48, "host_memory": 48}}


def test_a_run_on_a_device_that_ends_before_its_first_iteration_has_no_events(on_device, monkeypatch):
    """It goes on from a checkpoint of the last iteration; parameters were published, or gathered, at its start."""
    monkeypatch.setattr(torch.cuda, "Stream", lambda device, priority: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    stream = CudaStream(torch.device("cuda", 0), None)
    stream.log = log_of(on_device, "publish", "to_host", "publish", "parameters")
    stream.copy(torch.zeros(4), torch.ones(4))
    assert on_device.rows and on_device.events() == []


def test_bytes_belong_to_the_iteration_whose_step_ends_them():
    recorder = Recorder(0)
    recorder.moved("publish", "to_host", 5)
    recorder.begin_iteration()
    recorder.moved("gather", "network", 7)
    recorder.end_count()
    recorder.end_count()  # the hook and the result of a step that is skipped both say so
    recorder.moved("publish", "to_host", 6)
    recorder.begin_iteration()
    recorder.end_count()
    assert recorder.counted == {
        1: {"gather": {"network": 7}, "publish": {"to_host": 5, "host_memory": 5}},
        2: {"publish": {"to_host": 6, "host_memory": 6}},
    }


def test_a_run_without_a_trace_counts_nothing():
    recorder = Recorder(0, iterations=range(1, 3))
    recorder.begin_iteration()
    recorder.moved("gather", "network", 7)
    recorder.end_count()
    assert recorder.counted == {}


def test_the_end_of_a_gather_is_recorded_where_its_handle_has_a_future():
    recorder, work = Recorder(0), torch.futures.Future()
    assert recorder.add_end("gpu", "unshard", 5, SimpleNamespace(get_future=lambda: work))
    work.set_result(None)
    assert [(lane, name, start) for lane, name, start, _, _ in recorder.rows] == [("gpu", "unshard", 5)]


def test_the_end_of_a_gather_is_not_known_where_a_fork_has_its_own_handle():
    recorder = Recorder(0)
    assert not recorder.add_end("gpu", "unshard", 5, SimpleNamespace(wait=lambda: None))
    assert recorder.rows == []
