"""Times of work on a device, by a device of this file: a host clock, and a stream that runs behind it."""

from types import SimpleNamespace

import pytest
import torch
from gathered import as_ranks_do

from megatron_ext.measure import device_time, layer_times, sampling
from megatron_ext.measure.device_time import CYCLES_PER_SECOND, LEAST_SPIN_SECONDS, MOST_SPIN_SECONDS, DeviceTimer
from megatron_ext.measure.operation import DONE, Operation
from megatron_ext.measure.sampling import SHORT_BYTES, timed


class Device:
    """``host`` and ``stream``: seconds until which each of them is busy."""

    def __init__(self):
        self.host = self.stream = 0.0

    def launch(self, host: float, device: float) -> None:
        self.host += host
        self.stream = max(self.stream, self.host) + device

    def event(self, enable_timing):
        return Event(self)


class Event:
    def __init__(self, device: Device):
        self.device = device

    def record(self):
        self.at = max(self.device.stream, self.device.host)

    def query(self) -> bool:
        return self.device.host >= self.at

    def synchronize(self):
        self.device.host = max(self.device.host, self.at)

    def elapsed_time(self, end):
        return (end.at - self.at) * 1e3


@pytest.fixture
def device(monkeypatch):
    device = Device()
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: device.launch(0.0, cycles / CYCLES_PER_SECOND))
    monkeypatch.setattr(torch.cuda, "Event", device.event)
    for module in (device_time, sampling):
        monkeypatch.setattr(module, "perf_counter", lambda: device.host)
    return device


def test_launches_that_take_longer_than_their_work_are_not_measured(device):
    timer = DeviceTimer()

    def layer() -> None:
        for _ in range(40):
            device.launch(host=20e-6, device=3e-6)

    first, _ = timer.time("layer", layer)
    later, issued = timer.time("layer", layer)
    assert first > 600  # the host's 800 us: the first call of a key is to warm up
    assert later == pytest.approx(120, rel=1e-6) and issued == pytest.approx(800)


def test_no_spin_grows_by_the_wait_for_itself(device):
    """The host's step waits for the device in its midst: by the wait for the spin the next would be twice as long."""

    class Step(Operation):
        settles = True

        def issue(self, size_bytes, round_index):
            device.launch(host=20e-6, device=100e-6)
            device.host = device.stream  # as it settles
            device.host += 1e-3  # steps
            return DONE

    timer, begin = DeviceTimer(), device.host
    for round_index in range(10):
        us, _ = timed(None, Step(None), SHORT_BYTES + 1, round_index, timer)
    assert us == pytest.approx(1100, rel=0.05)
    assert device.host - begin < 10 * 1.5e-3


@pytest.mark.parametrize(("device_us", "before_us"), [(30, 50), (16e3, 50), (100, 2000)])
def test_a_layer_that_waits_for_the_device_does_not_count_the_spin(device, device_us, before_us):
    """As a batch that is read, and copied from pageable memory. Each spin would be longer than the last."""

    def layer() -> None:
        device.launch(host=before_us * 1e-6, device=device_us * 1e-6)
        device.host = device.stream
        device.launch(host=150e-6, device=3e-6)

    timer, begin = DeviceTimer(), device.host
    right = before_us + device_us + 150
    assert timer.time("step", layer, alone=True)[1] == pytest.approx(right)
    found = [timer.time("step", layer) for _ in range(9)]
    assert [issued for _, issued in found] == pytest.approx([right] * 9)
    assert [us for us, _ in found] == pytest.approx([device_us + 150 + 3] * 9)
    assert (device.host - begin) * 1e6 < 10 * right + 9 * 4 * right + 1e3


def test_one_slow_call_does_not_change_what_the_others_take(device):
    timer, slow = DeviceTimer(), 3

    def layer() -> None:
        nonlocal slow
        slow -= 1
        device.launch(host=3e-3 if slow == 0 else 0.3e-3, device=1e-3)

    found = [timer.time("layer", layer, alone=number == 0) for number in range(8)]
    assert [issued for _, issued in found] == pytest.approx([300] * 8)
    assert [us for us, _ in found[1:]] == pytest.approx([1000, 4000 - timer.spin_seconds("layer") * 1e6, *[1000] * 5])


def test_layers_are_timed_alone_while_they_warm_up(device, monkeypatch):
    """As often as in a measurement: two micro-batches after one."""

    class Step:
        def forward(self) -> None:
            device.launch(host=50e-6, device=100e-6)
            device.host = device.stream
            device.launch(host=150e-6, device=3e-6)

        backward = forward

    monkeypatch.setattr(layer_times, "on_cuda", lambda: True)
    runners, timer = {"step": Step()}, DeviceTimer()
    for repeats, warmup in ((2, 1), (3, 0)):  # in the later rounds of long micro-batches nothing warms up
        (row,) = layer_times.measure_compute(runners, repeats, warmup=warmup, timer=timer)
        assert row.forward_launch_us == pytest.approx(300) and row.forward_us == pytest.approx(253)


def test_what_was_issued_is_told_apart_from_what_waits(device):
    def call() -> float:
        device.launch(host=5e-6, device=1e-3)
        issued = device.host
        device.launch(host=7e-6, device=0.0)
        return issued

    assert DeviceTimer().time("copy", call) == (pytest.approx(1000), pytest.approx(5))


def test_ranks_that_issue_about_equally_fast_spin_equally_long(device):
    spins = []
    for host in (0.9e-3, 0.6e-3):
        timer = DeviceTimer()
        timer.time("x", lambda host=host: device.launch(host, 0.0))
        spins.append(timer.spin_seconds("x"))
    assert spins[0] == spins[1] >= 2 * 0.9e-3
    timer.time("slow", lambda: device.launch(10.0, 0.0))
    assert timer.spin_seconds("slow") == MOST_SPIN_SECONDS and timer.spin_seconds("new") == LEAST_SPIN_SECONDS


@pytest.mark.parametrize(("others", "spin"), [([1.0], 1.0), ([LEAST_SPIN_SECONDS] * 2, LEAST_SPIN_SECONDS), ([], None)])
def test_ranks_that_issue_together_spin_equally_long_from_then_on(device, monkeypatch, others, spin):
    """A collective lasts until its last rank begins. A single rank goes on by its previous call."""
    as_ranks_do(monkeypatch, lambda own: [own, *(dict.fromkeys(own, other) for other in others)])
    timer = DeviceTimer()
    timer.agree()  # nothing has been timed: no rank exchanges anything
    timer.time("gather", lambda: device.launch(1e-3, 0.0))
    timer.agree()
    for host in (10e-3, 1e-6):
        timer.time("gather", lambda host=host: device.launch(host, 0.0))
        assert timer.spin_seconds("gather") == (spin or max(2.0**-5 if host > 5e-3 else 0.0, LEAST_SPIN_SECONDS))
    assert timer.spin_seconds("other") == LEAST_SPIN_SECONDS


def test_a_visit_spins_equally_long_on_all_ranks(device, monkeypatch):
    """In the warm-up this rank issues in a time that is beyond the next power, and the others in less."""
    as_ranks_do(monkeypatch, lambda own: [own, *(dict.fromkeys(own, LEAST_SPIN_SECONDS) for _ in range(2))])
    fabric = SimpleNamespace(torch_device=SimpleNamespace(type="cuda"), barrier=lambda: None, agree=lambda value: value)
    spins = []
    monkeypatch.setattr(device_time, "spin", spins.append)

    class Gather(Operation):
        name = "gpu"

        def issue(self, size_bytes, round_index):
            device.launch(host=70e-6, device=100e-6)
            return DONE

    sampling.sample(fabric, Gather(fabric), SHORT_BYTES + 1, 1.0)
    assert spins[1] == 2 * LEAST_SPIN_SECONDS and set(spins[2:]) == {LEAST_SPIN_SECONDS} and len(spins) > 5


def test_a_torch_that_cannot_sleep_multiplies(device, monkeypatch):
    monkeypatch.delattr(torch.cuda, "_sleep")
    products = []
    monkeypatch.setattr(torch, "ones", lambda *shape, device: None)
    monkeypatch.setattr(torch, "mm", lambda a, b: products.append(a))
    device_time.spin(0.0101)
    assert len(products) == 11
