"""How long work takes on a CUDA device, without the host that issues it.

[Note: A stream that is never idle]
In training the host issues work ahead of the device. An event that is recorded on an idle stream has the time before
the host has issued what follows, so launches would be measured. Therefore a kernel that only spins goes first: it keeps
the stream busy until everything behind it has been issued. How long the host takes is known from the call before, and
the spin is a power of two, so that ranks that issue about equally fast begin together.
"""

import math
from collections.abc import Callable, Hashable
from time import perf_counter

import torch

CYCLES_PER_SECOND = 2e9
"""Of the fastest devices; on others the spin is longer."""

PRODUCT, PRODUCT_SECONDS = 4096, 0.001
"""Rows of a product of float32 matrices, and what it takes at the least: 137 Gflop."""

SLACK = 2.0
"""How many times what the host took last: it is not always equally fast."""

LEAST_SPIN_SECONDS, MOST_SPIN_SECONDS = 2.0**-13, 2.0**-5
"""0.12 and 31 ms. Longer than the second, a host would be the limit in training, too."""


def spin(seconds: float) -> None:
    """Keep the current stream busy for so long, or longer."""
    sleep = getattr(torch.cuda, "_sleep", None)
    if sleep is not None:
        sleep(int(seconds * CYCLES_PER_SECOND))
        return
    a = torch.ones(PRODUCT, PRODUCT, device="cuda")  # a torch without it
    for _ in range(math.ceil(seconds / PRODUCT_SECONDS)):
        torch.mm(a, a)


class DeviceTimer:
    """Times calls that issue work on the current stream of the current device, or make it wait for their work."""

    def __init__(self):
        self._host_seconds: dict[Hashable, float] = {}

    def time(self, key: Hashable, call: Callable[[], float | None]) -> tuple[float, float]:
        """``(on the device, until issued)`` of ``call``, in microseconds; returns when the device has done it.

        Args:
            key: what is called. The first call of a key is to warm up: how long the host takes is not known yet.
            call: may return when it had issued its work (``perf_counter``), if it did more behind that.
        """
        spin(self.spin_seconds(key))
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        start = perf_counter()
        issued = call()
        end.record()
        done = perf_counter()
        end.synchronize()
        self._host_seconds[key] = done - start
        return begin.elapsed_time(end) * 1e3, ((done if issued is None else issued) - start) * 1e6

    def spin_seconds(self, key: Hashable) -> float:
        """How long the stream is kept busy before the work of ``key``."""
        wanted = SLACK * self._host_seconds.get(key, 0.0)
        if wanted <= LEAST_SPIN_SECONDS:
            return LEAST_SPIN_SECONDS
        return min(2.0 ** math.ceil(math.log2(wanted)), MOST_SPIN_SECONDS)
