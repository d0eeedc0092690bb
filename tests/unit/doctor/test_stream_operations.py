"""A stream that waits for a flag, on a stand-in for the driver that does, does not, or refuses."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from megatron_ext.doctor import stream_operations
from megatron_ext.doctor.place import DoctorOptions, Place

OPTIONS = DoctorOptions(out="")


def place(kind: str) -> Place:
    # No torch.device: where another test has made torch.cuda speak of the CPU, it would be the CPU.
    return Place(0, 1, 0, 1, SimpleNamespace(type=kind, index=0), lambda value: [value], None)


class Driver(ModuleType):
    """``waits``: streams heed a flag; ``writes``: streams write one; ``code``: what calls return."""

    def __init__(self, waits: bool = True, writes: bool = True, code: int = 0):
        super().__init__("cuda.bindings.driver")
        self.waits, self.writes, self.code, self.done = waits, writes, code, not waits

    def cuStreamWaitValue64(self, stream, address, value, flags):
        return (self.code,)

    def cuStreamWriteValue64(self, stream, address, value, flags):
        self.done |= self.writes
        return (self.code,)


@pytest.fixture
def on_driver(monkeypatch):
    def check(driver: Driver):
        event = SimpleNamespace(record=lambda stream: None, query=lambda: driver.done)
        for name, value in {
            "Stream": lambda device: SimpleNamespace(cuda_stream=1),
            "Event": lambda: event,
            "synchronize": lambda device: None,
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
        monkeypatch.setattr(stream_operations, "PATIENCE_SECONDS", 0.01)
        monkeypatch.setattr(stream_operations, "find_spec", lambda name: name)
        monkeypatch.setitem(sys.modules, "cuda", ModuleType("cuda"))
        monkeypatch.setitem(sys.modules, "cuda.bindings", ModuleType("cuda.bindings"))
        monkeypatch.setitem(sys.modules, "cuda.bindings.driver", driver)
        (finding,) = stream_operations.check(place("cuda"), OPTIONS)
        return finding

    return check


def test_without_a_device_it_is_not_tried():
    (finding,) = stream_operations.check(place("cpu"), OPTIONS)
    assert finding.status == "could not try"


def test_without_bindings_it_is_not_tried(monkeypatch):
    monkeypatch.setattr(stream_operations, "find_spec", lambda name: None)
    (finding,) = stream_operations.check(place("cuda"), OPTIONS)
    assert finding.status == "could not try" and "cuda-bindings" in finding.found


def test_a_driver_that_waits_and_writes_passes(on_driver):
    assert on_driver(Driver()).status == "pass"


def test_a_stream_that_does_not_wait_fails(on_driver):
    assert "did not wait" in on_driver(Driver(waits=False)).found


def test_a_flag_that_is_not_seen_fails(on_driver):
    assert "was not seen" in on_driver(Driver(writes=False)).found


def test_a_driver_that_refuses_is_said(on_driver):
    finding = on_driver(Driver(code=801))
    assert finding.status == "could not try" and "801" in finding.found
