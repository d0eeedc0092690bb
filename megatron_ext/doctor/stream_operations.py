"""Does the driver let streams wait for, and write, flags in page-locked memory (stream memory operations)?

Tried, not asked: one stream waits for a flag that another stream writes. Source: CUDA Driver API, "Stream Memory
Operations". Not yet run on a GPU.
"""

import importlib
import time
from importlib.util import find_spec
from typing import Any

import torch

from megatron_ext.doctor.finding import Finding, failed, not_tried, passed
from megatron_ext.doctor.place import DoctorOptions, Place

NAME = "stream memory operations"
WAIT_GEQ = 0
"""``CU_STREAM_WAIT_VALUE_GEQ``: until the flag is at least the value."""

PATIENCE_SECONDS = 5.0


def check(place: Place, options: DoctorOptions) -> list[Finding]:
    """One flag, written by one stream and awaited by another, on this rank's device."""
    if not place.on_cuda:
        return [not_tried(NAME, "no CUDA device")]
    if find_spec("cuda") is None or find_spec("cuda.bindings") is None:
        return [not_tried(NAME, "no package cuda-bindings", "see cuda-bindings")]
    driver = importlib.import_module("cuda.bindings.driver")
    flag = torch.zeros(8, dtype=torch.int64).pin_memory()
    return [_wait_and_write(driver, flag, place.device)]


def _wait_and_write(driver: Any, flag: torch.Tensor, device: torch.device) -> Finding:
    """``flag``: int64, page-locked, zero."""
    waiting, writing = torch.cuda.Stream(device), torch.cuda.Stream(device)
    code, *_ = driver.cuStreamWaitValue64(waiting.cuda_stream, flag.data_ptr(), 1, WAIT_GEQ)
    if int(code):
        return _refused("cuStreamWaitValue64", code)
    reached = torch.cuda.Event()
    reached.record(waiting)
    time.sleep(0.01)
    early = reached.query()
    code, *_ = driver.cuStreamWriteValue64(writing.cuda_stream, flag.data_ptr(), 1, 0)
    if int(code):
        flag[0] = 1  # or the device would wait for ever
        return _refused("cuStreamWriteValue64", code)
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not reached.query() and time.monotonic() < deadline:
        time.sleep(0.001)
    late = not reached.query()
    flag[0] = 1
    torch.cuda.synchronize(device)
    if early or late:
        what = "a stream did not wait for its flag" if early else "a flag that a stream wrote was not seen"
        return failed(NAME, what, "threads wait in place of streams; please send this report")
    return passed(NAME, "a stream waits for a flag in host memory that another stream writes")


def _refused(call: str, code) -> Finding:
    return not_tried(NAME, f"the driver refuses {call}: {code!r}; threads wait in place of streams")
