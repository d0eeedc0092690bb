"""Run ``megatron-ext`` as a rank of a launcher on a pretended CUDA device: what runs only with a device then runs here.

torch.cuda answers as it does with one GPU, tensors lie in the CPU's memory, and work is done when it is issued. So this
finds wrong names, arguments and calls of the driver (memory that is locked twice, or unlocked but not locked; events
without times), and says nothing about order or speed: for orders see strict_device.py.

    pretended_cuda.py VERB [OPTION]...
"""

import contextlib
import ctypes
import os
import sys
import threading
import time
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace

import torch
import torch.distributed as dist
from torch.cuda import nccl
from torch.overrides import TorchFunctionMode

from megatron_ext.cpubench import ordered_collectives

DEVICE = torch.device("cuda", 0)
GIB = 1 << 30

locked: dict[int, int] = {}
"""Address and bytes of all memory that is page-locked."""


class Event:
    def __init__(self, enable_timing: bool = False):
        self.timed, self.at = enable_timing, None

    def record(self, stream=None) -> None:
        self.at = time.perf_counter()

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: "Event") -> float:
        assert self.timed and end.timed and self.at is not None and end.at is not None
        return 1e3 * (end.at - self.at)

    def synchronize(self) -> None:
        pass


class Stream:
    cuda_stream, device = 1, DEVICE

    def __init__(self, device=None, priority: int = 0):
        assert priority in (0, -1)

    def wait_event(self, event: Event) -> None:
        assert isinstance(event, Event)

    def record_event(self) -> Event:
        event = Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        pass


_here, _default = threading.local(), Stream()


@contextlib.contextmanager
def on(stream: Stream):
    before, _here.stream = getattr(_here, "stream", _default), stream
    yield
    _here.stream = before


def sleep(cycles: int) -> None:
    time.sleep(cycles / 2e9)


def register(address: int, size: int, flags: int) -> int:
    assert address not in locked, "locked twice"
    locked[address] = size
    return 0


def wait(stream: int, address: int, value: int, flags: int) -> tuple[int]:
    end = time.monotonic() + 20
    while ctypes.c_int64.from_address(address).value < value:
        assert time.monotonic() < end, "a stream waits for a flag that never comes"
        time.sleep(1e-4)
    return (0,)


def store(stream: int, address: int, value: int, flags: int) -> tuple[int]:
    ctypes.c_int64.from_address(address).value = value
    return (0,)


def _driver() -> ModuleType:
    driver = ModuleType("cuda.bindings.driver")
    vars(driver).update(
        CUresult=SimpleNamespace(CUDA_SUCCESS=0),
        CUdevice_attribute=SimpleNamespace(CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS=1),
        cuInit=lambda flags: (0,),
        cuDeviceGetAttribute=lambda attribute, device: (0, 1),
        cuMemHostGetDevicePointer=lambda address, flags: (0, address),
        cuStreamWaitValue64=wait,
        cuStreamWriteValue64=store,
    )
    return driver


def _import_driver() -> None:
    bindings, package = ModuleType("cuda.bindings"), ModuleType("cuda")
    vars(bindings)["driver"], vars(package)["bindings"] = _driver(), bindings
    for module in (package, bindings):
        module.__spec__, module.__path__ = ModuleSpec(module.__name__, None, is_package=True), []
    sys.modules.update({"cuda": package, "cuda.bindings": bindings, "cuda.bindings.driver": bindings.driver})


class _Mode(TorchFunctionMode):
    """Tensors that are made on the device lie in the CPU's memory."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        place = {"device": "cpu"} if (kwargs or {}).get("device") in (DEVICE, "cuda") else {}
        return func(*args, **(kwargs or {}) | place)


def _over_gloo(function):
    def run(*args, backend=None, **kwargs):
        args = ["gloo" if isinstance(arg, str) else arg for arg in args]
        return function(*args, **kwargs, **({} if backend is None else {"backend": "gloo"}))

    return run


def install() -> None:
    """Pretend that there is a device, until the process ends."""
    _Mode().__enter__()
    run = threading.Thread.run

    def run_in_mode(self):
        with _Mode():  # each thread has its own modes
            run(self)

    threading.Thread.run = run_in_mode
    properties = dict(total_memory=64 * GIB, uuid="GPU-1", pci_domain_id=0, pci_bus_id=1, pci_device_id=0)
    answers = dict(
        is_available=lambda: True,
        device_count=lambda: 1,
        set_device=lambda device: None,
        synchronize=lambda device=None: None,
        Event=Event,
        Stream=Stream,
        stream=on,
        current_stream=lambda device=None: getattr(_here, "stream", _default),
        _sleep=sleep,
        cudart=lambda: SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=locked.pop),
        get_device_properties=lambda device=None: SimpleNamespace(**properties),
        get_device_name=lambda device=None: "pretended",
        mem_get_info=lambda device=None: (60 * GIB, 64 * GIB),
    )
    for name, answer in answers.items():
        setattr(torch.cuda, name, answer)
    _import_driver()
    nccl.version = lambda: (2, 28, 9)
    ordered_collectives.install()
    dist.init_process_group, dist.new_group = map(_over_gloo, (dist.init_process_group, dist.new_group))
    from megatron_ext.measure import operations
    from megatron_ext.runtime import device

    device.HostDevice = lambda: device.CudaDevice(DEVICE)
    make = operations.MatrixProduct.__init__

    def make_small(self, *args, **kwargs):
        make(self, *args, **kwargs)
        self.products = 1  # a device computes thousands of times as much in a millisecond

    operations.MatrixProduct.__init__ = make_small


if __name__ == "__main__":
    install()
    os.environ["TORCHELASTIC_RUN_ID"] = (
        "pretended"  # as under torchrun, where one rank measures in its own process, too
    )
    from megatron_ext.cli import main

    code = main.main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(code or 0)
