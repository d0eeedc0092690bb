"""How long our Python takes for a copy that the training thread issues on CUDA, with streams that do nothing.

What it calls of ``torch.cuda`` and of the driver is replaced by calls that return at once; as many of these without
anything of ours are taken off. No GPU takes part.
"""

import time
from collections.abc import Callable
from statistics import median
from types import SimpleNamespace
from unittest import mock

import torch

from megatron_ext.runtime import device as devices
from megatron_ext.runtime.device import HostDevice
from megatron_ext.runtime.faults import Faults
from megatron_ext.runtime.flags import private_flags
from megatron_ext.runtime.group import Clock
from megatron_ext.runtime.host_pool import COPY
from megatron_ext.runtime.issuer import Issuer
from megatron_ext.runtime.routes.host_copy import HostCopy
from megatron_ext.runtime.stream_flags import StreamFlags

RANKS = 8
"""Of the node: as many flags are waited for where a group comes for the first time since the optimizer's step."""


class _Idle:
    """A stream, an event, a context or a tensor on which nothing happens."""

    cuda_stream, dtype = 1, torch.float32

    def __init__(self, *_, **__):
        pass

    def record(self, stream=None):
        pass

    def wait_event(self, event):
        pass

    def copy_(self, source, non_blocking=False):
        pass

    def __enter__(self):
        pass

    def __exit__(self, *_):
        pass


_idle = _Idle()


def _give_idle(device=None, **_):
    return _idle


def issued_copy(rounds: int = 30, copies: int = 2000) -> dict:
    """Microseconds of the calling thread for one copy by the ``cpu`` route, issued and waited for."""
    found = []
    driver = SimpleNamespace(
        cuStreamWaitValue64=lambda *_: (0,),
        cuStreamWriteValue64=lambda *_: (0,),
        cuMemHostGetDevicePointer=None,
        CUresult=SimpleNamespace(CUDA_SUCCESS=0),
    )
    names = {
        "Event": _Idle,
        "Stream": _give_idle,
        "current_stream": _give_idle,
        "stream": _give_idle,
        "device": _give_idle,
    }
    with (
        mock.patch.multiple(torch.cuda, **names),
        mock.patch.object(devices, "open_stream_flags", lambda device: (StreamFlags(driver), "")),
    ):
        device, host, clock = devices.CudaDevice(torch.device("cuda", 0)), torch.zeros(4), Clock()

        flags = {(0, COPY): private_flags(RANKS, HostDevice())}
        nothing = lambda *_: False
        pool = SimpleNamespace(rank=0, copies={0: host}, flags=flags, by_thread=nothing, check_published=nothing)
        route = HostCopy(pool, device, Issuer(), clock, Faults())
        group = SimpleNamespace(index=0, whole=_idle)

        def ours() -> None:
            route.issue(group).wait()

        taken, event = torch.cuda.Event(), torch.cuda.Event()

        def theirs() -> None:
            taken.record(torch.cuda.current_stream(device.device))
            _idle.wait_event(taken)
            with torch.no_grad(), torch.cuda.stream(_idle):
                _idle.copy_(host, non_blocking=True)
            event.record(_idle)
            torch.cuda.current_stream(device.device).wait_event(event)

        for _ in range(rounds):
            found.append(_us(ours, copies) - _us(theirs, copies))
    return {"own_us_per_copy": median(found), "least_us": min(found), "most_us": max(found)}


def _us(call: Callable[[], None], times: int) -> float:
    begin = time.thread_time_ns()
    for _ in range(times):
        call()
    return (time.thread_time_ns() - begin) / times / 1e3
