"""What a machine with a GPU pays dearly for, seen by the strict stand-in while a run trains: copies between the device
and host memory that is not page-locked, and large work of one thread of the processor where it may use more.

A copy that waits and also casts counts: torch casts on the processor, in memory that is not page-locked, where it casts
on the device for others. How many threads torch would take is asked in the thread that does the work, as it is set
there. What numpy or the kernel copies is not seen.
"""

import contextlib
import os
from unittest import mock

import torch

LEAST_BYTES = 1 << 20


class DearCopies:
    """Watches between the begin of an iteration and whatever ends training steps.

    Args:
        processors: that this machine seems to have, so that a rank may use several threads; None: as it is, and work of
            one thread is not looked at.
        least_bytes: smaller copies are left alone. Tests train small models, for which it is less.
        set_threads: False: the run does not set the threads that it may use, a negative control.
    """

    def __init__(self, processors: int | None = None, least_bytes: int = LEAST_BYTES, set_threads: bool = True):
        self.processors, self.least_bytes, self._set_threads = processors, least_bytes, set_threads
        self.training, self.seen, self.looked_at = False, [], 0

    def patches(self):
        if self.processors is None:
            return
        from megatron_ext.megatron import build_executor
        from megatron_ext.runtime import host_threads

        yield mock.patch.object(build_executor, "has_cuda", lambda: True)
        if self._set_threads:
            yield mock.patch.object(os, "sched_getaffinity", lambda pid: set(range(self.processors or 1)))
        else:
            yield mock.patch.object(host_threads, "use", lambda *ranks: [])
        yield self._threads_as_before()

    @contextlib.contextmanager
    def _threads_as_before(self):
        before = torch.get_num_threads()
        try:
            yield
        finally:
            torch.set_num_threads(before)

    def on_host(self, label: str, tensors) -> None:
        """The processor works on ``tensors`` in this thread."""
        size = max((tensor.nbytes for tensor in tensors), default=0)
        if self.training and self.processors is not None and size >= self.least_bytes:
            self.looked_at += 1
            if torch.get_num_threads() == 1:
                self._say(f"{label}: {size} bytes by one thread")

    def between(self, label: str, found, regions, waits: bool) -> None:
        """``found`` are the tensors of a copy between device and host, by region of host memory or None; ``waits``: the
        thread does."""
        size = max(tensor.nbytes for tensor, _, _ in found)
        if not self.training or size < self.least_bytes:
            return
        self.looked_at += 1
        if waits and len({tensor.dtype for tensor, _, _ in found}) > 1:
            self._say(f"{label}: {size} bytes are cast on their way")
        elif any(region is not None and not region.locked for region in regions):
            self._say(f"{label}: {size} bytes between the device and pageable memory")

    def _say(self, text: str) -> None:
        if text not in self.seen:
            self.seen.append(text)
