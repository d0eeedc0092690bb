"""Steps of the host's optimizer beside the backward: speculation, then validation.

[Note: Speculation, then validation]
The gradient norm, and with it the factor by which gradients are clipped, is known only when every gradient is reduced;
so is whether a gradient has overflowed. A unit (the parameters of one group) does not wait for that. As soon as its
gradient is reduced, a thread copies it to the host. Another one keeps a copy of the unit's states, and steps it, as if
nothing were clipped and nothing had overflowed. The copies lie in memory of a fixed size; a unit that finds no room
there, or whose turn comes after the last backward, is stepped as without all this, when the norm is known. Of a unit
whose states rest on a drive the drive keeps what was before, see drive_unit.py.

When the optimizer steps, each unit is validated: one element of each gradient that was stepped on is compared with the
gradient as it is then. Clipping multiplies all elements by one factor. In fp32 a product with a factor other than 1
differs from every normal number but 0, so one normal element that is the same to the last bit says that all are. A unit
whose gradient has changed gets its states back from their copy and is stepped again. If the optimizer skips its step,
all units get their states back, and the device its parameters. Training is therefore that of the step which waits, to
the last bit.
Source: SuperOffload (arXiv 2509.21271), speculation-then-validation.
"""

import threading
from collections.abc import Callable
from functools import partial
from time import perf_counter_ns

import torch

from megatron_ext.runtime.faults import Faults
from megatron_ext.runtime.worker import Transfer, Worker

ALIGNMENT = 64
"""Bytes at which each copy begins."""


class StepUnit:
    """The parameters of one group on this rank, stepped together.

    Args:
        group: index in the schedule.
        optimizer: steps these parameters alone. They and their states are fp32 tensors in host memory.
        gradients: by parameter, where its reduced gradient lies, a tensor of any shape with as many elements.
        shards: by parameter, the device's tensor that a step writes; one that is taken back writes it, too.
        inverse_scale: gives the factor by which the optimizer will unscale gradients, or None where it does not.
    """

    def __init__(
        self,
        group: int,
        optimizer: torch.optim.Optimizer,
        gradients: dict[torch.Tensor, torch.Tensor],
        shards: dict[torch.Tensor, torch.Tensor],
        inverse_scale: Callable[[], float | None],
    ):
        assert all(gradient.dtype == torch.float32 for gradient in gradients.values())  # see the note above
        self.group, self.optimizer, self.inverse_scale = group, optimizer, inverse_scale
        self.gradients, self.shards = gradients, shards
        self.saved: list[tuple[torch.Tensor, torch.Tensor]] = []  # a tensor, and what it was
        self.compared: list[tuple[int, torch.Tensor]] = []  # of each gradient an element's place, and what it was
        self.ended = None  # the copies of the new parameters to the device

    ahead = True
    """Whether its gradients may be copied while another unit is stepped."""

    def bytes(self) -> int:
        """Of the copy of the states."""
        return sum(_aligned(tensor) for tensor in self._tensors())

    def _tensors(self) -> list[torch.Tensor]:
        found = []
        for parameter in self.gradients:
            # Megatron's host optimizer lists the parameter itself among its states.
            states = [value for value in self.optimizer.state[parameter].values() if value is not parameter]
            assert all(isinstance(value, torch.Tensor) for value in states)
            found += [parameter, *states]
        return found

    def wait_for_room(self) -> None:
        """Until there is memory for the gradients in host memory."""

    def take_gradients(self) -> None:
        """Copy the gradients to the host; queued on the current stream."""
        for parameter, gradient in self.gradients.items():
            own = _gradient(parameter)
            own.copy_(gradient.view(own.shape), non_blocking=True)

    def unscale(self) -> None:
        """Unscale the gradients, and keep of each the element that validation compares."""
        factor, self.compared = self.inverse_scale(), []
        for parameter in self.gradients:
            own = _gradient(parameter).view(-1)
            if factor is not None:
                own.mul_(factor)
            place = _largest(own)
            self.compared.append((place, own[place].clone()))

    def step(self, memory: torch.Tensor) -> None:
        """Unscale the gradients, copy the states into ``memory`` (1D uint8), and step."""
        self.unscale()
        start = 0
        for tensor in self._tensors():
            copy = memory[start : start + tensor.numel() * tensor.element_size()].view(tensor.dtype).view(tensor.shape)
            self.saved.append((tensor, copy.copy_(tensor)))
            start += _aligned(tensor)
        self.optimizer.step()

    def stands(self) -> bool:
        """Whether the gradients are what the step was made with, see the note above."""
        pairs = list(zip(self.gradients.values(), self.compared, strict=True))
        now = torch.stack([gradient.view(-1)[place] for gradient, (place, _) in pairs]).cpu()
        then = torch.stack([value for _, (_, value) in pairs])
        normal = then.isfinite() & ((then == 0) | (then.abs() >= torch.finfo(then.dtype).tiny))
        return bool((normal & (now == then)).all())

    def keep(self) -> None:
        """The step counts."""
        self.saved.clear()

    @torch.no_grad()
    def take_back(self, device) -> None:
        """Give the states the values from before the step."""
        device.synchronize(self.ended)  # it may still read the host's parameters
        for tensor, copy in self.saved:
            tensor.copy_(copy)
        self.saved.clear()

    @torch.no_grad()
    def restore_device(self) -> None:
        """Give the device's parameters the values of the host's."""
        for parameter, shard in self.shards.items():
            shard.copy_(parameter)


class EarlySteps:
    """Steps units as soon as their gradients are reduced, see the note above.

    Args:
        units: each group's own; a group may have several, of several optimizers.
        rollback_bytes: memory for copies of states.
        begin: called before the first step of an iteration could begin, on the training thread.
        published: called on the thread that steps, before it changes parameters: returns when what was published of the
            last step no longer reads them; None where nothing is.
        device: see :mod:`megatron_ext.runtime.device`.
        rank: injected delays differ by it.
        recorder: where steps are recorded, or None.
    """

    def __init__(
        self,
        units: list[StepUnit],
        rollback_bytes: int,
        begin: Callable[[], None],
        published: Callable[[], None] | None,
        device,
        faults: Faults,
        rank: int,
        recorder=None,
    ):
        self._units: dict[int, list[StepUnit]] = {}
        for unit in units:
            self._units.setdefault(unit.group, []).append(unit)
        self.memory = torch.empty(rollback_bytes, dtype=torch.uint8).zero_()
        self.ready = False
        """Whether the device's parameters are those that the host's optimizer has made in its last step."""
        self.taken = self.taken_back = 0  # steps made early, and those of them that did not stand
        self._begin, self._published, self._device, self._recorder = begin, published, device, recorder
        self._delay = faults.delayer(faults.step_delay_ms, salt=113 + rank)
        self._keeps = bool(faults.no_rollback)
        self._copier, self._worker = Worker("early-copies"), Worker("early-steps")
        self._copies, self._stream, self._reduces = (device.copy_stream() for _ in range(3))
        self.copying = threading.Lock()  # held while gradients are copied, which nobody may change meanwhile
        self._open, self._used = False, 0
        self._stepped: list[StepUnit] = []

    # Every iteration, in this order, on the training thread.

    def begin(self) -> None:
        """An iteration begins."""
        self.undo()  # of an iteration that no step of the optimizer has followed
        self._used = 0
        if self.ready:
            self._begin()
            self._open = True

    def reduced(self, group: int, handle=None) -> None:
        """The last reduce of ``group`` in this iteration is issued, or has ended (``handle``: None); any thread.

        Megatron waits for the same handle. Before torch 2.8 two threads must not do so at once (what the handle keeps
        alive has no lock), so on CUDA a stream waits here, and the thread that copies waits for the stream.
        """
        if self._open:
            after = self._device.mark()
            if handle is not None and self._device.kind == "cuda":
                reduce, handle = handle, None
                after = self._device.on_stream(lambda: reduce.wait(), self._reduces, after).event
            for unit in self._units.get(group, ()):
                self._copier.submit(partial(self._take, unit, handle, after))

    def end(self) -> None:
        """The backward has ended, and gradients may change when this returns. What has not begun is left."""
        with self.copying:
            self._open = False

    def settle(self, units: list[StepUnit], changed: bool) -> list[StepUnit]:
        """The optimizer steps: those of ``units`` whose early step stands. The others have their states back.

        Args:
            changed: the optimizer's settings are not those that the early steps were made with.
        """
        self.wait()
        stepped = [unit for unit in self._stepped if unit in units]
        standing = [unit for unit in stepped if self._keeps or (not changed and unit.stands())]
        for unit in stepped:
            if unit in standing:
                unit.keep()
            else:
                unit.take_back(self._device)
            self._stepped.remove(unit)
        self.taken_back += len(stepped) - len(standing)
        return standing

    def undo(self) -> None:
        """The optimizer does not step: every unit and its parameters on the device are as they were before."""
        self.end()
        self.wait()
        for unit in self._stepped:
            if self._keeps:
                unit.keep()
            else:
                unit.take_back(self._device)
                unit.restore_device()
        self.taken_back += len(self._stepped)
        self._stepped.clear()

    def wait(self) -> None:
        """For the steps that have begun, and on the device for the parameters that they have copied there."""
        for worker in (self._copier, self._worker):
            worker.submit(lambda transfer: None).wait()
        for unit in self._stepped:
            if unit.ended is not None:
                unit.ended.wait()

    # On the thread that copies.

    def _take(self, unit: StepUnit, handle, after, transfer: Transfer) -> None:
        size = unit.bytes()
        if self._used + size > self.memory.numel():
            return

        def copy() -> None:
            if handle is not None:
                handle.wait()
            unit.take_gradients()

        if not unit.ahead:
            self._worker.submit(lambda transfer: None).wait()
        unit.wait_for_room()
        with torch.no_grad(), self.copying:
            if not self._open:
                return
            if self._delay is not None:
                self._delay()
            self._device.synchronize(self._device.on_stream(copy, self._copies, after))
        memory, self._used = self.memory[self._used : self._used + size], self._used + size
        self._worker.submit(partial(self._step, unit, memory))

    # On the thread that steps.

    def _step(self, unit: StepUnit, memory: torch.Tensor, transfer: Transfer) -> None:
        begin = perf_counter_ns()
        with torch.no_grad():
            if self._published is not None:
                self._device.on_stream(self._published, self._stream, None)
            self._stepped.append(unit)
            unit.ended = self._device.on_stream(partial(unit.step, memory), self._stream, None)
        self.taken += 1
        if self._delay is not None:
            self._delay()
        if self._recorder is not None:
            self._recorder.add("host_step", str(unit.group), begin, perf_counter_ns())

    def close(self) -> None:
        """Take back what no step of the optimizer has followed, and end the threads."""
        self.undo()
        self._copier.close()
        self._worker.close()


def _gradient(parameter: torch.Tensor) -> torch.Tensor:
    assert parameter.grad is not None  # since the optimizer's first step
    return parameter.grad


def _aligned(tensor: torch.Tensor) -> int:
    size = tensor.numel() * tensor.element_size()
    return size + -size % ALIGNMENT


def _largest(gradient: torch.Tensor) -> int:
    """Index of an element of a 1D tensor that is 0 only if all are, and NaN if one is."""
    index = int(gradient.argmax())
    return index if gradient[index] > 0 else int(gradient.argmin())
