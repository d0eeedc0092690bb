"""Times work on a CUDA device, without the host that issues it.

[Note: A stream that is never idle]
In training the host issues work ahead of the device. An event that is recorded on an idle stream gets the time before
the host has issued the following work, so launches would be measured. Therefore a kernel that only spins is issued
first. It keeps the stream busy until everything after it has been issued. The previous call tells how long the host
takes.

A collective lasts until the last of its ranks has begun, so all ranks have to spin equally long: once they have warmed
up, they agree (:meth:`DeviceTimer.agree`). A spin is a power of two, but that alone is not enough: of many ranks one is
often beyond the next power, and all others wait for it. By 8 ranks a gather of 100 us was then seen as one of 222 us.

Some calls wait for the stream themselves: a batch is copied from pageable memory, or the host reads how many tokens an
expert gets. They also wait for the spin, so the host's time is not known, and each spin would be longer than the last.
If such a call has been timed alone, without a spin, the host's time is that of this call.
"""

import math
from collections.abc import Callable, Hashable
from statistics import median_high
from time import perf_counter

import torch

from megatron_ext.runtime.objects import gather_objects

CYCLES_PER_SECOND = 2e9
"""Clock rate of the fastest devices; on others the spin is longer."""

PRODUCT, PRODUCT_SECONDS = 4096, 0.001
"""Rows of a product of float32 matrices (137 Gflop), and the least seconds that it takes."""

SLACK = 2.0
"""The spin is this many times as long as the host's last call, because the host's speed varies."""

LEAST_SPIN_SECONDS, MOST_SPIN_SECONDS = 2.0**-13, 2.0**-5
"""0.12 and 31 ms. If the host takes longer than the second, it limits training as well."""


def spin(seconds: float) -> None:
    """Keep the current stream busy for at least ``seconds``."""
    sleep = getattr(torch.cuda, "_sleep", None)
    if sleep is not None:
        sleep(int(seconds * CYCLES_PER_SECOND))
        return
    a = torch.ones(PRODUCT, PRODUCT, device="cuda")  # for a torch without _sleep
    for _ in range(math.ceil(seconds / PRODUCT_SECONDS)):
        torch.mm(a, a)


class DeviceTimer:
    """Times calls that issue work on the current stream of the current device, or make it wait for their work."""

    def __init__(self):
        self._host: dict[Hashable, tuple[float, float]] = {}  # seconds that a call took, and until it had issued
        self._alone: set[Hashable] = set()
        self._agreed: dict[Hashable, float] = {}

    def time(self, key: Hashable, call: Callable[[], float | None], alone: bool = False) -> tuple[float, float]:
        """``(time on the device, time until issued)`` of ``call``, in microseconds. Returns when the device is done.

        Args:
            key: identifies the call. The first call of a key is a warm-up: the host's time is not known yet.
            call: may return the time at which it had issued its work (``perf_counter``), if it does more after that.
            alone: without a spin, so that the host's time is right if the call waits for the stream. The time on the
                device may then be that of the host.
        """
        if not alone:
            spin(self.spin_seconds(key))
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        start = perf_counter()
        issued = call()
        done = perf_counter()
        waited = begin.query() and key in self._alone  # or it was slow
        end.record()
        end.synchronize()
        if alone or not waited:
            self._host[key] = done - start, (done if issued is None else issued) - start
        if alone:
            self._alone.add(key)
        return begin.elapsed_time(end) * 1e3, self._host[key][1] * 1e6

    def agree(self) -> None:
        """Let all ranks spin as long as the median rank for what they have timed, the same on all. Collective."""
        everyone = gather_objects({key: self.spin_seconds(key) for key in self._host}) if self._host else []
        if len(everyone) > 1:  # a single rank goes by its previous call
            self._agreed = {key: median_high(own[key] for own in everyone) for key in self._host}

    def spin_seconds(self, key: Hashable) -> float:
        """Seconds for which the stream is kept busy before the work of ``key``."""
        wanted = max(SLACK * self._host.get(key, (0.0, 0.0))[0], LEAST_SPIN_SECONDS)
        return self._agreed.get(key) or min(2.0 ** math.ceil(math.log2(wanted)), MOST_SPIN_SECONDS)
