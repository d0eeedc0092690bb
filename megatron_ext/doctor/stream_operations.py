"""Do streams wait for flags in page-locked memory that other streams store? Tried as a run does it, not only queried.

Source: CUDA Driver API, "Stream Memory Operations".
"""

import os
import time

from megatron_ext.doctor.finding import Finding, failed, not_tried, passed
from megatron_ext.doctor.place import DoctorOptions, Place
from megatron_ext.runtime.device import CudaDevice
from megatron_ext.runtime.flags import private_flags
from megatron_ext.runtime.stream_flags import StreamFlagError

NAME = "stream memory operations"
PATIENCE_SECONDS = 5.0

NOT_SEEN = "a flag that a stream stored was not seen"
ONE_QUEUE = "with CUDA_DEVICE_MAX_CONNECTIONS=1 the store may be queued behind the wait; runs queue every store first"
"""See [Note: Who waits for which flag] in flags.py."""


def check(place: Place, options: DoctorOptions) -> list[Finding]:
    """One flag, stored by one stream and awaited by another, on this rank's device."""
    if not place.on_cuda:
        return [not_tried(NAME, "no CUDA device")]
    device = CudaDevice(place.device)
    if device.why_no_flags:
        return [not_tried(NAME, "schedules that copy between host and device are refused", device.why_no_flags)]
    try:
        wrong = _wait_and_store(device)
    except StreamFlagError as error:
        wrong = str(error)
    if wrong == NOT_SEEN and os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
        return [not_tried(NAME, ONE_QUEUE, "to try it, unset CUDA_DEVICE_MAX_CONNECTIONS for the doctor")]
    if wrong:
        return [failed(NAME, wrong, "please send this report")]
    return [passed(NAME, "a stream waited for a flag in host memory that another stream stored")]


def _wait_and_store(device: CudaDevice) -> str:
    """What is wrong; empty if nothing is."""
    (flag,), waiting, storing = private_flags(1, device), device.stream("waits"), device.stream("stores")
    try:
        waiting.wait_flag(flag, 1, lambda: None)
        reached = waiting.record(device.event())
        time.sleep(0.01)
        early = reached.query()
        storing.store(flag, 1)
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not reached.query():
            if time.monotonic() > deadline:
                return NOT_SEEN
            time.sleep(0.001)
    finally:
        flag.store(1)  # otherwise the device would wait for ever
    return "a stream did not wait for its flag" if early else ""
