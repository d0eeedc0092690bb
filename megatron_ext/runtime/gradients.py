"""Gradients that come and go: a whole gradient has bytes from its group's backward to the end of its reduce.

[Note: Life of a gradient within one iteration]
FREED until the backward of the group's last layer begins. ``allocate`` makes it ADDING, with zeros. After the backward
of the group's first layer, ``reduce`` makes it REDUCING. When its reduce has ended, this rank's part is added to the
shard and the gradient is FREED again. With ``reduce_every`` above 1 it stays ADDING through several backward steps.

A rank has one reduce in flight at a time: the previous one is waited for, added and freed before the next is issued.
The next layer's backward therefore runs during the reduce, at the price of two whole gradients, as in torch's FSDP2.
If the schedule says ``alone``, the previous one is freed before the next is allocated: one whole gradient, no overlap.
The training thread issues all reduces in the program's order, which is the same on all data-parallel ranks.

The storage is resized to 0 and back while every tensor object stays, so ``main_grad`` is the same view all the time;
see [Note: Freed storage] in group.py. The compute stream waits for the reduce, or for the copy to the host, before the
block is given back.

[Note: Gradients that are added in host memory]
After the reduce, a stream copies this rank's part to one of :data:`GRADIENT_SLOTS` slots in page-locked memory and
stores a flag. A thread polls the flag and adds the slot to the shard, both in host memory. The copy is issued when the
slot is empty again.
"""

from collections.abc import Callable, Iterable
from enum import Enum
from functools import partial
from time import perf_counter_ns

import torch

from megatron_ext.formats.moved_bytes import ADD_PASSES, reduced_bytes
from megatron_ext.runtime.flags import poll, private_flags
from megatron_ext.runtime.group import ScheduleError, WholeBytes
from megatron_ext.runtime.issuer import Issuer
from megatron_ext.runtime.part import Part
from megatron_ext.runtime.recorder import NOTHING, Recorder, log_of
from megatron_ext.runtime.worker import Transfer, Waitable, Worker
from megatron_ext.workload.state_layout import GRADIENT_SLOTS


class GradientState(Enum):
    """See [Note: Life of a gradient within one iteration]."""

    FREED = "freed"
    ADDING = "adding"
    REDUCING = "reducing"


_FREED, _ADDING, _REDUCING = GradientState.FREED, GradientState.ADDING, GradientState.REDUCING


class Gradient:
    """The gradient of one group on one rank. Starts out freed.

    Args:
        index: the group's id in the schedule.
        whole: 1D tensor with its own storage, the group's gradient with Megatron's padding.
        shard: 1D tensor of ``whole``'s dtype in which this rank's reduced part is accumulated; on the device or in host
            memory.
        shard_start: element of ``whole`` at which the part begins.
        instances: of the distributed optimizer; the reduced part is summed over them as well.

    Attributes:
        network_bytes: bytes that a reduce brings to this rank.
        version: number of reduces issued.
        issue: begins the reduce-scatter of ``whole`` in place; returns its handle.
    """

    __slots__ = (
        *("index", "whole", "shard", "shard_start", "part", "state", "version", "issue"),
        *("bytes", "network_bytes", "resize"),
    )

    def __init__(self, index: int, whole: torch.Tensor, shard: torch.Tensor, shard_start: int, instances: int = 1):
        self.index, self.whole, self.shard, self.shard_start = index, whole, shard, shard_start
        self.part = whole.narrow(0, shard_start, shard.numel())
        self.resize: Callable[[int], object] = whole.untyped_storage().resize_
        self.bytes = whole.numel() * whole.element_size()
        self.network_bytes = reduced_bytes(self.bytes, whole.numel() // shard.numel(), instances)
        assert whole.storage_offset() == 0 and whole.untyped_storage().nbytes() == self.bytes
        self.state, self.version = _FREED, 0
        self.issue: Callable | None = None
        self.resize(0)

    def __str__(self) -> str:
        return f"the gradient of group {self.index}"

    def forget(self) -> None:
        """Free it, as if nothing had been added or reduced."""
        if self.state is not _FREED:  # the pool counts what is freed
            self.resize(0)
        self.state, self.version = _FREED, 0


class GradientsToHost:
    """The slots through which gradients pass to their shards in host memory."""

    def __init__(self, largest_bytes: int, device, issuer: Issuer, recorder: Recorder):
        self._slots = [device.host_tensor(largest_bytes, torch.uint8) for _ in range(GRADIENT_SLOTS)]
        self.bytes = GRADIENT_SLOTS * largest_bytes
        self._worker, self._stream = Worker("gradients"), device.stream("gradients")
        self._stream.log, self._recorder = log_of(recorder, "gradient", "to_host", "publish", "gradient"), recorder
        self._arrived, self._copied = private_flags(GRADIENT_SLOTS, device), device.event()
        self._device, self._issuer = device, issuer
        self._adds: list[Transfer | None] = [None] * GRADIENT_SLOTS  # the last add that read each slot
        self._number = 0
        self.issued = True

    def bring(self, gradient: Gradient, reduced: Waitable, add: Callable[[torch.Tensor], None]) -> None:
        """Copy the part after ``reduced``; the thread calls ``add`` with the slot when the copy has arrived."""
        self._number += 1
        slot = self._number % GRADIENT_SLOTS
        part, before = gradient.part, self._adds[slot]
        staged = self._slots[slot][: part.numel() * part.element_size()].view(part.dtype)
        self._adds[slot] = self._worker.submit(partial(self._add, slot, self._number, staged, add))
        self.issued = False
        ready = lambda: before is None or before.ended
        self._issuer.when(ready, partial(self._issue, slot, self._number, part, staged, reduced))

    def _issue(self, slot: int, number: int, part: torch.Tensor, staged: torch.Tensor, reduced: Waitable) -> None:
        stream = self._stream
        stream.run(reduced.wait)
        stream.copy(staged, part)
        stream.record(self._copied)
        stream.store(self._arrived[slot], number)
        self.issued = True

    def _add(self, slot: int, number: int, staged: torch.Tensor, add: Callable, transfer: Transfer) -> None:
        """Runs on the thread."""
        poll(partial(self._arrived[slot].reached, number))
        begin = perf_counter_ns()
        with torch.no_grad():
            add(staged)
        self._recorder.moved("host_add", "host_memory", ADD_PASSES * staged.nbytes)
        self._recorder.add("host_add", "gradient", begin, perf_counter_ns())

    def wait_for_copy(self) -> None:
        """Make later work of the compute stream wait for the last copy."""
        self._issuer.wait(lambda: self.issued)
        self._device.compute.wait(self._copied)

    def finish(self) -> None:
        """Wait until every part is added."""
        self._issuer.join(self.behind())

    def behind(self) -> Transfer:
        """A transfer that ends when everything brought so far is added."""
        return self._worker.submit(lambda transfer: None)

    def close(self) -> None:
        self._worker.close()
        self._stream.close()


class Reducer(Part):
    """Allocates, reduces, accumulates and frees the gradients of one rank.

    Args:
        gradients: by group index.
        on_host: indices of those that a thread accumulates in host memory.
        device: see :mod:`megatron_ext.runtime.device`.
        order: counts collectives in debug mode, or None.
        recorder: where copies and additions in host memory are recorded.

    Attributes:
        complete: called with a group whose last reduce of the iteration is in flight, and with the transfer after which
            the shard in host memory holds its complete gradient. None instead of the transfer: the gradient is complete
            behind the work given to the compute stream.
    """

    def __init__(
        self,
        gradients: dict[int, Gradient],
        on_host: Iterable[int],
        device,
        issuer: Issuer,
        order=None,
        recorder: Recorder = NOTHING,
    ):
        self.gradients, self.on_host, self.order = gradients, frozenset(on_host), order
        self.residency = WholeBytes()
        self.sample: Callable[[], None] | None = None
        self.complete: Callable[[int, Transfer | None], None] | None = None
        self._in_flight: tuple[Gradient, Waitable, bool] | None = None
        parts = [gradients[index].part for index in self.on_host]
        largest = max((part.numel() * part.element_size() for part in parts), default=0)
        self._to_host = GradientsToHost(largest, device, issuer, recorder) if parts else None
        self._recorder = recorder

    @property
    def staging_bytes(self) -> int:
        """Bytes of the slots in host memory through which gradients pass to their shards."""
        return 0 if self._to_host is None else self._to_host.bytes

    def allocate(self, gradient: Gradient, alone: bool = False) -> None:
        """Give ``gradient`` its bytes, all zero: its backward begins. ``alone``: free the one in flight first."""
        if alone or gradient.state is _REDUCING:  # still reducing from its previous visit, as the last one issued
            self.finish_reduce()
        if gradient.state is not _FREED:
            raise ScheduleError(f"{gradient} is allocated while it is {gradient.state.value}")
        gradient.resize(gradient.bytes)
        gradient.whole.zero_()
        gradient.state = _ADDING
        self.residency.add(gradient.bytes)
        if self.sample is not None:
            self.sample()

    def reduce(self, gradient: Gradient, last: bool = False) -> None:
        """Wait for the reduce in flight, then issue the reduce-scatter of ``gradient``. ``last``: in this iteration."""
        self.finish_reduce()
        if gradient.state is not _ADDING or gradient.issue is None:
            raise ScheduleError(f"{gradient} is reduced while it is {gradient.state.value}")
        if self.order is not None:
            self.order.add(gradient)
        gradient.version += 1
        gradient.state = _REDUCING
        reduced = gradient.issue()
        self._recorder.moved("gradient", "network", gradient.network_bytes)
        self._in_flight = gradient, reduced, last
        if gradient.index in self.on_host:
            assert self._to_host is not None
            self._to_host.bring(gradient, reduced, partial(self._add, gradient))
            if last and self.complete is not None:
                self.complete(gradient.index, self._to_host.behind())

    def finish_reduce(self) -> None:
        """Wait for the reduce in flight, add its part to the shard, and free the whole gradient."""
        if self._in_flight is None:
            return
        (gradient, reduced, last), self._in_flight = self._in_flight, None
        begin = self._recorder.now() if self._recorder.recording else None
        to_host = self._to_host if gradient.index in self.on_host else None
        reduced.wait() if to_host is None else to_host.wait_for_copy()
        if begin is not None:
            self._recorder.add("reduce_wait", "a gradient", begin, self._recorder.now())
        if to_host is None:
            self._add(gradient, gradient.part)
        gradient.resize(0)
        gradient.state = _FREED
        self.residency.bytes -= gradient.bytes
        if to_host is None and last and self.complete is not None:
            self.complete(gradient.index, None)

    def _add(self, gradient: Gradient, part: torch.Tensor) -> None:
        gradient.shard.add_(part)

    def end(self) -> None:
        """Wait until every reduced part is in its shard.

        Raises:
            ScheduleError: a gradient was not reduced.
        """
        self.finish_reduce()
        for gradient in self.gradients.values():
            if gradient.state is not _FREED:
                raise ScheduleError(f"{gradient} is {gradient.state.value} at the end of the iteration")
        if self._to_host is not None:
            self._to_host.finish()

    def close(self) -> None:
        if self._to_host is not None:
            self._to_host.close()
