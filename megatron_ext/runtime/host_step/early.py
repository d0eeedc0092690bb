"""Steps of the host's optimizer during the backward: speculation, then validation.

[Note: Speculation, then validation]
The gradient norm, and with it the factor by which gradients are clipped, is known only when every gradient is reduced.
Only then is it known whether a gradient has overflowed. A unit (the parameters of one group) does not wait for that. As
soon as its gradient is reduced, it is copied to the host. A thread copies the unit's states and steps the unit as if
nothing were clipped and nothing had overflowed. The copies lie in memory of a fixed size. A unit that finds no room
there, or whose turn comes after the last backward, is stepped when the norm is known, as without early steps. If the
states of a unit rest on a drive, the drive keeps the previous states, see drive_states.py.

When the optimizer steps, each unit is validated: one element of each gradient that was used is compared with the final
gradient. Clipping multiplies all elements by one factor. In fp32, the product of a normal number and a factor other
than 1 differs from that number. So if one normal element is the same to the last bit, all elements are. A unit whose
gradient has changed gets its states back from their copy and is stepped again. If the optimizer skips its step, all
units get their states back, and the shards get their parameters back. Training is therefore bitwise the same as with
steps that wait for the norm.

At its beginning a training is often clipped in every iteration, and each step would be made twice. After an iteration
in which most early steps were taken back, the next one makes none. If they fail again in the iteration after that, the
next 2, 4 and so on up to :data:`LONGEST_PAUSE` iterations make none. An iteration in which most of them stand resets
this.
Source: SuperOffload (arXiv 2509.21271), speculation-then-validation.
"""

import threading
from collections.abc import Callable
from functools import partial
from time import perf_counter_ns

import torch

from megatron_ext.runtime.host_step.room import StepStreams
from megatron_ext.runtime.host_step.unit import HostUnit
from megatron_ext.runtime.issuer import Issuer
from megatron_ext.runtime.part import Part
from megatron_ext.runtime.publisher import Publisher
from megatron_ext.runtime.worker import Transfer, Worker

LOOKED_AT = 4096
"""Validation first seeks the element that it compares among so many elements at the start of a gradient."""

LONGEST_PAUSE = 16
"""The largest number of iterations without early steps after an iteration in which they were taken back."""


class EarlyUnit:
    """A unit that is stepped during the backward.

    Args:
        gradients: the reduced gradient of each piece of the unit, fp32.
        inverse_scale: returns the factor by which the optimizer will unscale gradients, or None if it does not unscale;
            reads nothing from a device.
    """

    def __init__(self, unit: HostUnit, gradients: list[torch.Tensor], inverse_scale: Callable[[], float | None]):
        assert all(gradient.dtype is torch.float32 for gradient in gradients)  # see the note above
        self.unit, self.gradients, self.inverse_scale = unit, gradients, inverse_scale
        self.compared: list[tuple[int, torch.Tensor]] = []  # index and value of one element of each gradient
        self.on_host = any(piece.gradient_on_host for piece in unit.pieces)

    def unscale(self) -> None:
        """Unscale the gradients of the step. Keep the element of each gradient that validation compares. Thread."""
        factor, self.compared = self.inverse_scale(), []
        for piece in self.unit.pieces:
            assert piece.parameter.grad is not None
            own = piece.parameter.grad.view(-1)
            if factor is not None:
                own.mul_(factor)
            place = _normal_element(own)
            self.compared.append((place, own[place].clone()))

    def gradients_unchanged(self) -> bool:
        """Whether the gradients are still those of the early step, see the note above."""
        pairs = list(zip(self.gradients, self.compared, strict=True))
        now = torch.stack([gradient.view(-1)[place] for gradient, (place, _) in pairs]).cpu()
        then = torch.stack([value for _, (_, value) in pairs])
        normal = then.isfinite() & ((then == 0) | (then.abs() >= torch.finfo(then.dtype).tiny))
        return bool((normal & (now == then)).all())


class EarlySteps(Part):
    """Steps units as soon as their gradients are reduced, see the note above.

    Args:
        units: the units of each group; a group may have several, of several optimizers.
        rollback_bytes: memory for copies of states.
        settings: called before the first step of an iteration can begin.
        publisher: has read the parameters of the last step before a step changes them; None: nothing is published.
        link: the streams that all units' rooms use.
    """

    def __init__(
        self,
        units: list[EarlyUnit],
        rollback_bytes: int,
        settings: Callable[[], None],
        publisher: Publisher | None,
        link: StepStreams,
        issuer: Issuer,
    ):
        self._units: dict[int, list[EarlyUnit]] = {}
        for unit in units:
            self._units.setdefault(unit.unit.group, []).append(unit)
        self.memory = torch.empty(rollback_bytes, dtype=torch.uint8).zero_()
        self.ready = False
        """Whether the shards hold what the host's optimizer has made in its last step."""
        self.taken = self.taken_back = 0  # number of early steps, and of those that were taken back
        self._settings, self._publisher = settings, publisher
        self._link, self._device, self._issuer = link, link.device, issuer
        self._worker = Worker("early-steps")
        self._reduced = {unit: link.device.event() for unit in units}
        self._copying = threading.Lock()  # held while gradients in host memory are copied
        self._open, self._used = False, 0
        self._pause = self._left_out = 0  # length of the pause in iterations, and how many of it are left
        self._before = (0, 0)  # early steps made and taken back, when the iteration began
        self._jobs: list[tuple[EarlyUnit, Transfer]] = []
        self._stepped: list[EarlyUnit] = []

    # In every iteration, in this order, on the training thread.

    def begin(self) -> None:
        self.skipped()  # takes early steps back that no step of the optimizer followed
        self._used = 0
        self._learn()
        if self.ready and not self._left_out:
            self._settings()
            self._open = True

    def _learn(self) -> None:
        """Decide from the last iteration's early steps whether this iteration makes any, see the note above."""
        taken, back = self.taken - self._before[0], self.taken_back - self._before[1]
        self._before = self.taken, self.taken_back
        if taken:
            self._pause = 0 if 2 * back <= taken else min(2 * self._pause or 1, LONGEST_PAUSE)
            self._left_out = self._pause
        elif self._left_out:
            self._left_out -= 1

    def reduced(self, group: int, behind: Transfer | None = None, handle=None) -> None:
        """The last reduce of ``group`` in this iteration is in flight.

        Args:
            behind: when this transfer has ended, the gradient is complete in host memory; None: it lies on the device.
            handle: of the reduce; None: the compute stream has already been told to wait for the reduce.
        """
        self._issuer.poll()  # issues parameters of units stepped meanwhile, which frees rooms
        for unit in self._units.get(group, ()) if self._open else ():
            if handle is None:
                self._device.compute.record(self._reduced[unit])
            self._issuer.when(unit.unit.has_room, partial(self._take, unit, behind, handle))

    def _take(self, unit: EarlyUnit, behind: Transfer | None, handle) -> None:
        size = unit.unit.rollback_bytes() if self._open else 0
        if not self._open or self._used + size > self.memory.numel():
            return
        memory, self._used = self.memory[self._used : self._used + size], self._used + size
        if handle is not None:  # the wait itself may write the gradient, so the last arrival does not cover it
            self._link.arriving.run(handle.wait)
        unit.unit.arrive([self._reduced[unit]] if handle is None else [], unit.gradients)
        job = self._worker.submit(partial(self._step, unit, memory, behind))
        self._jobs.append((unit, job))
        self._issuer.when(lambda: job.ended, partial(self._leave, unit, job))

    def _leave(self, unit: EarlyUnit, job: Transfer) -> None:
        """The step has been made, or was not begun."""
        job.check()
        if unit in self._stepped:
            if self._publisher is not None:  # it may still be copying the old shard on the device
                self._link.leaving.wait(self._publisher.copied)
            unit.unit.leave()
        else:
            unit.unit.give_up()

    def end(self) -> None:
        """The backward has ended. When this returns, gradients may change. Steps that have not begun are not made."""
        with self._copying:
            self._open = False
        self._link.wait_for_arrivals()

    def finish(self, units: list[HostUnit], changed: bool) -> list[HostUnit]:
        """The optimizer steps: returns those of ``units`` whose early step stands. The others get their states back.

        Args:
            changed: the optimizer's settings differ from those of the early steps.
        """
        self.wait()
        stepped = [unit for unit in self._stepped if unit.unit in units]
        standing = [unit for unit in stepped if not changed and unit.gradients_unchanged()]
        return [unit.unit for unit in self.decide(stepped, standing, False)]

    def skipped(self) -> None:
        """The optimizer does not step: restore every unit and its shards."""
        self.end()
        self.wait()
        self.decide(list(self._stepped), [], True)

    def decide(self, stepped: list[EarlyUnit], standing: list[EarlyUnit], skipped: bool) -> list[EarlyUnit]:
        """The steps of ``standing`` count and are returned. The other units of ``stepped`` get their states back. In an
        iteration that is ``skipped``, their shards get their parameters back."""
        if stepped:
            self._link.left.synchronize()  # copies may still read the host's parameters
        for unit in stepped:
            self._stepped.remove(unit)
            if unit in standing:
                unit.unit.keep()
                continue
            unit.unit.take_back()
            if skipped:
                unit.unit.write_shards()
        self.taken_back += len(stepped) - len(standing)
        return standing

    def changed(self) -> None:
        self.ready = False

    def wait(self) -> None:
        """Wait for the steps that have begun; their parameters are then on their way to the device."""
        for _, job in self._jobs:
            self._issuer.join(job)
        self._jobs.clear()
        self._issuer.poll()  # let the last ones leave

    # On the background thread.

    @torch.no_grad()
    def _step(self, unit: EarlyUnit, memory: torch.Tensor, behind: Transfer | None, transfer: Transfer) -> None:
        if behind is not None:
            behind.wait()
        begin, host = perf_counter_ns(), unit.unit
        host.wait_for_gradients()
        with self._copying:
            if unit.on_host and not self._open:
                return
            host.begin()
        unit.unscale()
        if self._publisher is not None:
            self._publisher.wait_on_thread()
        self._stepped.append(unit)
        host.step_early(memory)
        self.taken += 1
        self._link.recorder.add("host_step", str(host.group), begin + host.read_ns, perf_counter_ns())

    def close(self) -> None:
        """Take back the early steps that no step of the optimizer has followed, and end the thread."""
        self.skipped()
        self._worker.close()


def _normal_element(gradient: torch.Tensor) -> int:
    """Index of an element of a 1D tensor that is a normal number other than 0. If there is none, the index of any
    element other than 0. Searching all of a large gradient takes longer than the step, and nearly always one of the
    first elements will do."""
    tiny = torch.finfo(gradient.dtype).tiny
    for own in (gradient[:LOOKED_AT], gradient):
        size = own.abs()
        found = (size >= tiny) & (size < torch.inf)
        index = int(found.to(torch.uint8).argmax())
        if found[index]:
            return index
    return int((gradient != 0).to(torch.uint8).argmax())
