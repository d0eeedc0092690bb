"""A stream that waits for a flag, on a stand-in for the driver that does, does not, or refuses."""

from types import SimpleNamespace

import pytest
import torch

from megatron_ext.doctor import stream_operations
from megatron_ext.doctor.place import DoctorOptions, Place
from megatron_ext.runtime import device
from megatron_ext.runtime.stream_flags import StreamFlags, pip_line

OPTIONS = DoctorOptions(out="")
CARD = SimpleNamespace(cudaHostRegister=lambda *_: 0, cudaHostUnregister=lambda _: 0)


def place(kind: str) -> Place:
    # No torch.device: where another test has made torch.cuda speak of the CPU, it would be the CPU.
    return Place(0, 1, 0, 1, SimpleNamespace(type=kind, index=0), lambda value: [value], None)


class Driver:
    """``waits``: streams heed a flag; ``stores``: streams store one; ``code``: what calls return."""

    CUresult = SimpleNamespace(CUDA_SUCCESS=0)

    def __init__(self, waits: bool = True, stores: bool = True, code: int = 0):
        self.stores, self.code, self.done, self.waited_for = stores, code, not waits, None

    def cuMemHostGetDevicePointer(self, address, flags):
        return 0, address + 4096

    def cuStreamWaitValue64(self, stream, address, value, flags):
        self.waited_for = address, value
        return (self.code,)

    def cuStreamWriteValue64(self, stream, address, value, flags):
        self.done |= self.stores and (address, value) == self.waited_for
        return (self.code,)


@pytest.fixture
def on_driver(monkeypatch):
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)

    def check(driver: Driver):
        event = SimpleNamespace(record=lambda stream: None, query=lambda: driver.done)
        for name, value in {
            "Stream": lambda device, priority: SimpleNamespace(cuda_stream=1),
            "Event": lambda: event,
            "synchronize": lambda device: None,
            "cudart": lambda: CARD,
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(stream_operations, "PATIENCE_SECONDS", 0.01)
        monkeypatch.setattr(device, "open_stream_flags", lambda own: (StreamFlags(driver), ""))
        (finding,) = stream_operations.check(place("cuda"), OPTIONS)
        return finding

    yield check
    device.CudaDevice(torch.device("cpu")).close()


def test_without_a_device_it_is_not_tried():
    (finding,) = stream_operations.check(place("cpu"), OPTIONS)
    assert finding.status == "could not try"


def test_without_bindings_it_is_not_tried(monkeypatch):
    monkeypatch.setattr(device, "open_stream_flags", lambda own: (None, pip_line()))
    (finding,) = stream_operations.check(place("cuda"), OPTIONS)
    assert finding.status == "could not try" and "cuda-bindings" in finding.advice


def test_a_driver_that_waits_and_stores_passes(on_driver):
    assert on_driver(Driver()).status == "pass"


@pytest.mark.parametrize(
    "driver, said",
    [(Driver(waits=False), "did not wait"), (Driver(stores=False), "was not seen"), (Driver(code=801), "801")],
)
def test_a_driver_that_does_not_what_its_attributes_promise_fails(on_driver, driver, said):
    """A run would train wrongly, hang, or end."""
    finding = on_driver(driver)
    assert finding.status == "fail" and said in finding.found


@pytest.mark.parametrize(("connections", "status"), [("1", "could not try"), ("8", "fail")])
def test_one_queue_for_all_streams_is_no_failure(on_driver, monkeypatch, connections, status):
    """There this check's store lies behind its wait. Runs queue stores first."""
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", connections)
    assert on_driver(Driver(stores=False)).status == status
    assert on_driver(Driver(waits=False)).status == "fail"
