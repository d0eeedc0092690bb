"""Gradients that come and go: a whole gradient has bytes from its group's backward to the end of its reduce.

[Note: Life of a gradient within one iteration]
FREED until the backward of the group's last layer begins; ``allocate`` makes it ADDING, with zeros; behind the
backward of the group's first layer ``reduce`` makes it REDUCING; when its reduce has ended, its own part is added to
the shard and it is FREED again. With ``reduce_every`` above 1 it stays ADDING through several backward steps.

A rank has one reduce in flight at a time: the one before is waited for, added and freed before the next is issued.
The next layer's backward therefore runs beside the reduce, at the price of two whole gradients, as in torch's FSDP2.
Where the schedule says ``alone``, the one before is freed before the next is allocated: one whole gradient, no overlap.
The training thread issues all reduces in the program's order, which is that of all data-parallel ranks.

The storage is resized to 0 and back while every tensor object stays, so ``main_grad`` is the same view all the time;
see [Note: Freed storage] in group.py. On CUDA the compute stream waits for the reduce, or for the copy to the host,
before the block is given back.
"""

from collections.abc import Callable, Iterable
from enum import Enum

import torch

from megatron_ext.runtime.faults import Faults
from megatron_ext.runtime.group import Residency, ScheduleError
from megatron_ext.runtime.worker import Transfer, Waitable, Worker


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
        whole: 1D tensor with a storage of its own, the group's gradient with Megatron's padding.
        shard: 1D tensor of ``whole``'s dtype, where this rank's reduced part is added up; on the device or in host
            memory.
        shard_start: element of ``whole`` at which the part begins.

    Attributes:
        version: reduces that were issued.
        issue: begins the reduce-scatter of ``whole`` in place; returns its handle.
    """

    __slots__ = ("index", "whole", "shard", "shard_start", "part", "state", "version", "issue", "bytes", "resize")

    def __init__(self, index: int, whole: torch.Tensor, shard: torch.Tensor, shard_start: int):
        self.index, self.whole, self.shard, self.shard_start = index, whole, shard, shard_start
        self.part = whole.narrow(0, shard_start, shard.numel())
        self.bytes, self.resize = whole.numel() * whole.element_size(), whole.untyped_storage().resize_
        assert whole.storage_offset() == 0 and whole.untyped_storage().nbytes() == self.bytes
        self.state, self.version = _FREED, 0
        self.issue: Callable | None = None
        self.resize(0)

    def __str__(self) -> str:
        return f"the gradient of group {self.index}"


class Reducer:
    """Allocates, reduces, adds up and frees the gradients of one rank.

    Args:
        gradients: by group index.
        on_host: indices of those that are added up in host memory, by a thread.
        device: see :mod:`megatron_ext.runtime.device`.
        rank: of the data-parallel group; injected delays differ by it.
        order: counts collectives in debug mode, or None.
    """

    def __init__(
        self, gradients: dict[int, Gradient], on_host: Iterable[int], device, faults: Faults, rank, order=None
    ):
        self.gradients, self.on_host, self.device, self.order = gradients, frozenset(on_host), device, order
        self.residency = Residency()
        self.sample: Callable[[], None] | None = None
        self.complete: Callable[[int], None] | None = None  # told when a group's shard holds all of its gradient
        self._early, self._skipped, self._late = bool(faults.no_wait), faults.skip_reduce, faults.late_add
        self._held: torch.Tensor | None = None
        self._delay = faults.delayer(faults.reduce_delay_ms, salt=71 + rank)
        self._in_flight: tuple[Gradient, Waitable, bool] | None = None
        self.worker = Worker("gradients") if self.on_host else None
        self.stream = device.copy_stream() if self.on_host else None
        sizes = [gradients[index].shard.numel() for index in self.on_host]
        self._staging = None
        if sizes and device.kind == "cuda":
            dtype = next(iter(gradients.values())).whole.dtype
            self._staging = device.host_tensor(max(sizes), dtype)

    @property
    def staging_bytes(self) -> int:
        """Of the buffer in host memory through which gradients reach their shards."""
        return 0 if self._staging is None else self._staging.numel() * self._staging.element_size()

    def allocate(self, gradient: Gradient, alone: bool = False) -> None:
        """Give ``gradient`` its bytes, all zero: its backward begins. ``alone``: once the one on its way is freed."""
        if alone or gradient.state is _REDUCING:  # of the visit before, the last that was issued
            self.settle()
        if gradient.state is not _FREED:
            raise ScheduleError(f"{gradient} is allocated while it is {gradient.state.value}")
        gradient.resize(gradient.bytes)
        gradient.whole.zero_()
        gradient.state = _ADDING
        self.residency.add(gradient.bytes)
        if self.sample is not None:
            self.sample()

    def reduce(self, gradient: Gradient, last: bool = False) -> None:
        """Issue the reduce-scatter of ``gradient``, its ``last`` in the iteration or not; waits for the one before."""
        self.settle()
        if gradient.state is not _ADDING or gradient.issue is None:
            raise ScheduleError(f"{gradient} is reduced while it is {gradient.state.value}")
        if self._delay is not None:
            self._delay()
        if self.order is not None:
            self.order.add(gradient)
        gradient.version += 1
        if gradient.index == self._skipped:
            self._free(gradient)
            return
        gradient.state = _REDUCING
        reduced = gradient.issue()
        if gradient.index in self.on_host:
            assert self.worker is not None
            transfer = self.worker.submit(lambda transfer: self._bring(transfer, gradient, reduced, last))
            self._in_flight = gradient, transfer, False
        else:
            self._in_flight = gradient, reduced, last

    def settle(self) -> None:
        """Wait for the reduce that is on its way, add its part to the shard, and free the whole gradient."""
        if self._in_flight is None:
            return
        (gradient, handle, last), self._in_flight = self._in_flight, None
        if isinstance(handle, Transfer):  # which adds
            handle.wait()
        else:
            self._wait_and_add(gradient, handle)
        self._free(gradient)
        self._tell(gradient, last)

    def _tell(self, gradient: Gradient, last: bool) -> None:
        if last and self.complete is not None:
            self.complete(gradient.index)

    def _free(self, gradient: Gradient) -> None:
        gradient.resize(0)
        gradient.state = _FREED
        self.residency.bytes -= gradient.bytes

    def _add(self, gradient: Gradient, part: torch.Tensor) -> None:
        if gradient.index == self._late and self._held is None:
            self._held = part.clone()
        else:
            gradient.shard.add_(part)

    def finish(self) -> None:
        """End an iteration: every reduced part is in its shard when this returns.

        Raises:
            ScheduleError: a gradient was not reduced.
        """
        self.settle()
        for gradient in self.gradients.values():
            if gradient.state is not _FREED:
                raise ScheduleError(f"{gradient} is {gradient.state.value} at the end of the iteration")
        if self.worker is not None:
            self.worker.submit(lambda transfer: None).wait()
        if self._held is not None:
            self.gradients[self._late].shard.add_(self._held)
            self._held = None

    def _bring(self, transfer: Transfer, gradient: Gradient, handle, last: bool) -> None:
        """On the thread: wait for the reduce, and add the part to the shard in host memory."""
        if self._delay is not None:
            self._delay()
        with torch.no_grad():
            if self._staging is None:
                self._wait_and_add(gradient, handle)
            else:
                self._add_to_host(transfer, gradient, handle, self._staging[: gradient.shard.numel()])
        self._tell(gradient, last)

    def _wait_and_add(self, gradient: Gradient, handle) -> None:
        if self._early:
            self._add(gradient, gradient.part)
        handle.wait()
        if not self._early:
            self._add(gradient, gradient.part)

    def _add_to_host(self, transfer: Transfer, gradient: Gradient, handle, staging: torch.Tensor) -> None:
        def copy() -> None:
            handle.wait()  # on this thread's stream
            staging.copy_(gradient.part, non_blocking=True)

        transfer.after = self.device.on_stream(copy, self.stream, None)
        transfer.finish()  # the training thread goes on: its stream waits for the copy
        self.device.synchronize(transfer.after)
        self._add(gradient, staging)

    def close(self) -> None:
        if self.worker is not None:
            self.worker.close()
