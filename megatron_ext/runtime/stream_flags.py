"""The driver's functions for flags that streams store and wait for, see flags.py.

Source: CUDA driver API, Stream Memory Operations (cuStreamWaitValue64, cuStreamWriteValue64). Run on an H200 with
cuda-bindings 13.3.
"""

from typing import Any

import torch

REFUSED = "this device has no 64-bit stream memory operations"


class StreamFlagError(RuntimeError):
    """The driver refused an operation that its attributes promised."""


class StreamFlags:
    """Stores and waits on the streams of one device; addresses are those of 8-byte flags in page-locked memory.

    Args:
        driver: the module ``cuda.bindings.driver``.
    """

    def __init__(self, driver: Any):
        self._wait, self._store = driver.cuStreamWaitValue64, driver.cuStreamWriteValue64
        self._pointer, self._ok = driver.cuMemHostGetDevicePointer, driver.CUresult.CUDA_SUCCESS

    def offset(self, memory: torch.Tensor) -> int:
        """Difference between the device's address of a byte in page-locked ``memory`` and its host address."""
        code, address = self._pointer(memory.data_ptr(), 0)
        if code != self._ok:
            raise StreamFlagError(f"cuMemHostGetDevicePointer failed with {code}")
        return int(address) - memory.data_ptr()

    def wait(self, stream: torch.cuda.Stream, address: int, value: int) -> None:
        """Make the work queued on ``stream`` from now on wait until the flag is at least ``value``."""
        (code,) = self._wait(stream.cuda_stream, address, value, 0)
        if code != self._ok:
            raise StreamFlagError(f"cuStreamWaitValue64 failed with {code}")

    def store(self, stream: torch.cuda.Stream, address: int, value: int) -> None:
        """Queue a store of ``value`` to the flag after the work queued on ``stream``."""
        (code,) = self._store(stream.cuda_stream, address, value, 0)
        if code != self._ok:
            raise StreamFlagError(f"cuStreamWriteValue64 failed with {code}")


def pip_line() -> str:
    """The command that installs the package ``cuda.bindings``; PyTorch includes it from CUDA 13 on."""
    return f'pip install "cuda-bindings=={(torch.version.cuda or "13").partition(".")[0]}.*"'


def open_stream_flags(device: torch.device) -> tuple[StreamFlags | None, str]:
    """``(flags, "")``, or ``(None, why)`` if the device offers no such flags."""
    try:
        from cuda.bindings import driver  # pyright: ignore[reportMissingImports] # optional
    except ImportError:
        return None, pip_line()
    driver.cuInit(0)
    attribute = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS
    code, able = driver.cuDeviceGetAttribute(attribute, device.index)
    if code != driver.CUresult.CUDA_SUCCESS:
        return None, f"cuDeviceGetAttribute failed with {code}"
    return (StreamFlags(driver), "") if able else (None, REFUSED)
