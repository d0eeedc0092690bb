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
from megatron_ext.runtime.faults import Faults
from megatron_ext.runtime.group import Clock
from megatron_ext.runtime.routes import CpuRoute
from megatron_ext.runtime.stream_flags import StreamFlags

RANKS = 8
"""Of the node: as many flags are waited for where a group comes for the first time since the optimizer's step."""


class _Idle:
    """A stream, an event, a context or a tensor on which nothing happens."""

    cuda_stream = 1

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


def _give_idle(device=None):
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
    names = {"Event": _Idle, "Stream": _Idle, "current_stream": _give_idle, "stream": _give_idle, "device": _give_idle}
    with (
        mock.patch.multiple(torch.cuda, **names),
        mock.patch.object(devices, "open_stream_flags", lambda device: (StreamFlags(driver), "")),
    ):
        device, host, clock = devices.CudaDevice(torch.device("cuda", 0)), torch.zeros(4), Clock()

        def wait_published(group, version, stream):
            for word in range(RANKS):
                device.flags.wait(stream, word, version)

        pool = SimpleNamespace(rank=0, copies={0: host}, wait_published=wait_published)
        route, group = CpuRoute(pool, device, clock, Faults()), SimpleNamespace(index=0, whole=_idle)

        def ours() -> None:
            route.issue(group).wait()

        def theirs() -> None:
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(device.device))
            with torch.cuda.device(device.device), torch.cuda.stream(_idle):
                _idle.wait_event(event)
                _idle.copy_(host, non_blocking=True)
                event = torch.cuda.Event(blocking=True)
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
