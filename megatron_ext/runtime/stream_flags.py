"""Flags that a CUDA stream stores and waits for, beside the copies that they announce.

[Note: Order by streams]
A rank's publishing is queued ahead on a stream: copy of the shard, then store of its flag. Another rank queues a wait
for all flags and then its copy to the device. No thread stands between a flag and a copy, and the training thread never
waits for either. The store comes behind everything queued before it and is seen system-wide behind those writes.
CUDA does not know this order. It cannot deadlock, even where all streams share one hardware queue
(``CUDA_DEVICE_MAX_CONNECTIONS=1``): every rank queues the stores of a version before its waits for that version, and
the stores of ``reads_done`` before its waits for them, and nothing that a store comes behind waits for a later one.
Threads that store flags wait for nothing that they have given to a stream themselves. For the same reason a call that
makes the host wait for the whole device (the first launch of a kernel that is loaded lazily, a free of the allocator)
ends: what it waits for needs nothing that this host has yet to issue. Tests train on a stand-in with one queue.
Source: CUDA driver API, Stream Memory Operations (cuStreamWaitValue64, cuStreamWriteValue64).

Not yet run on a GPU.
"""

from typing import Any

import torch

MISSING = "the package cuda-bindings is not installed"
REFUSED = "this device knows no 64-bit stream memory operations"


class StreamFlagError(RuntimeError):
    """The driver refused what its attributes promised."""


class StreamFlags:
    """Stores and waits of one device's streams; addresses are of 8-byte flags in page-locked memory.

    Args:
        driver: the module ``cuda.bindings.driver``.
    """

    def __init__(self, driver: Any):
        self._wait, self._store = driver.cuStreamWaitValue64, driver.cuStreamWriteValue64
        self._pointer, self._ok = driver.cuMemHostGetDevicePointer, driver.CUresult.CUDA_SUCCESS

    def offset(self, memory: torch.Tensor) -> int:
        """What to add to a host address in page-locked ``memory`` to get the device's address of the same byte."""
        code, address = self._pointer(memory.data_ptr(), 0)
        if code != self._ok:
            raise StreamFlagError(f"cuMemHostGetDevicePointer failed with {code}")
        return int(address) - memory.data_ptr()

    def wait(self, stream: torch.cuda.Stream, address: int, value: int) -> None:
        """What is queued on ``stream`` from now on waits until the flag is at least ``value``."""
        (code,) = self._wait(stream.cuda_stream, address, value, 0)
        if code != self._ok:
            raise StreamFlagError(f"cuStreamWaitValue64 failed with {code}")

    def store(self, stream: torch.cuda.Stream, address: int, value: int) -> None:
        """Behind what is queued on ``stream``, the flag becomes ``value``."""
        (code,) = self._store(stream.cuda_stream, address, value, 0)
        if code != self._ok:
            raise StreamFlagError(f"cuStreamWriteValue64 failed with {code}")


def open_stream_flags(device: torch.device) -> tuple[StreamFlags | None, str]:
    """``(flags, "")``, or ``(None, why the device offers none)``; then threads wait for flags."""
    try:
        from cuda.bindings import driver  # pyright: ignore[reportMissingImports] # optional
    except ImportError:
        return None, MISSING
    driver.cuInit(0)
    attribute = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS
    code, able = driver.cuDeviceGetAttribute(attribute, device.index)
    if code != driver.CUresult.CUDA_SUCCESS:
        return None, f"cuDeviceGetAttribute failed with {code}"
    return (StreamFlags(driver), "") if able else (None, REFUSED)
