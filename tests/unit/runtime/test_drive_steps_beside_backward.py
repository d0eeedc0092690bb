"""Units whose states rest on a drive, stepped during the backward: whatever becomes of a step, training is the same."""

import os
import random
import time

import drive_faults
import faults
import pytest
import torch
from drive_faults import FAULTS

from megatron_ext.runtime.device import HostDevice
from megatron_ext.runtime.drive import DriveError
from megatron_ext.runtime.host_step.after_norm import AfterNorm
from megatron_ext.runtime.host_step.drive_states import DriveStates, DriveUnit
from megatron_ext.runtime.host_step.early import EarlySteps, EarlyUnit
from megatron_ext.runtime.host_step.flat_adamw import FlatAdamW
from megatron_ext.runtime.host_step.room import StepStreams
from megatron_ext.runtime.host_step.unit import Piece
from megatron_ext.runtime.issuer import Issuer
from megatron_ext.runtime.recorder import NOTHING, Recorder
from megatron_ext.workload.drive_reads import DriveReads

SHAPES = [(3, 5), (7,), (64, 33), (1,), (2048,), (129, 2)]
UNITS = [[0, 1], [2], [3, 4], [5]]
GROUPS = [0, 0, 1, 2]
"""Of each unit."""


def made(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


class Training:
    """Parameters that an optimizer steps, and 16-bit ones of a device that it writes."""

    kind = torch.optim.AdamW

    def __init__(self):
        self.parameters, self.gradients = made(0), made(1)
        self.shards = [parameter.bfloat16() for parameter in self.parameters]
        self.optimizers = [self._optimizer(unit) for unit in UNITS]

    def _optimizer(self, unit: list[int]) -> torch.optim.Optimizer:
        params = [self.parameters[i] for i in unit]
        return self.kind([{"params": params, "weight_decay": 0.1}], lr=1e-2, fused=True)

    def step(self, optimizers) -> None:
        for optimizer in optimizers:
            optimizer.step()


class InMemory(Training):
    def iteration(self, factor: float | None) -> None:
        """``factor``: gradients are clipped by it; None: the iteration is skipped."""
        if factor is not None:
            for parameter, gradient in zip(self.parameters, self.gradients):
                parameter.grad = gradient * factor
            self.step(self.optimizers)
            for shard, parameter in zip(self.shards, self.parameters):
                shard.copy_(parameter)

    def states(self) -> list[dict[str, torch.Tensor]]:
        kept = [own for optimizer in self.optimizers for own in optimizer.state.items()]
        return [{"param": p, "exp_avg": own["exp_avg"], "exp_avg_sq": own["exp_avg_sq"]} for p, own in kept]


class OnDrive(Training):
    kind = FlatAdamW

    def __init__(self, directory, slots: int, recorder=NOTHING):
        super().__init__()
        issuer, device = Issuer(), HostDevice()
        self.link = StepStreams(device, device.device, recorder=recorder)
        self.after_norm = AfterNorm(self.link)
        settings = DriveReads(block_bytes=4096, queue_depth=2)
        how = dict(settings=settings, link=self.link, issuer=issuer, early=True)
        self.drive = DriveStates(directory, slots=slots, **how)
        self.units = self.drive.units
        for group, unit, optimizer in zip(GROUPS, UNITS, self.optimizers):
            pieces = [Piece(self.parameters[i], lambda i=i: self.gradients[i], self.shards[i]) for i in unit]
            self.units.append(DriveUnit(self.drive, group, optimizer, pieces))
        self.drive.open()
        early = [
            EarlyUnit(one, [self.gradients[i] for i in unit], lambda: None) for one, unit in zip(self.units, UNITS)
        ]
        how = dict(issuer=issuer)
        self.early = EarlySteps(early, 0, lambda: None, None, self.link, **how)
        self.iteration(1.0, [])
        self.early.ready = True

    def iteration(self, factor: float | None, order: list[int], late: list[int] = ()) -> None:
        """The groups of ``order`` are reduced one after the other, those of ``late`` behind the last backward."""
        self.early.begin()
        for group in order:
            self.early.reduced(group)
        self.early.wait()
        self.early.end()
        for group in late:
            self.early.reduced(group)
        if factor is None:
            self.early.skipped()
            return
        for gradient in self.gradients:
            gradient.mul_(factor)
        done = self.early.finish(list(self.units), changed=False)
        left = [unit for unit in self.units if unit not in done]
        self.drive.expect(left)
        self.after_norm.expect(left)
        self.step([unit.optimizer for unit in left])

    def states(self) -> list[dict[str, torch.Tensor]]:
        return [self.drive.read_tensors(parameter) for parameter in self.parameters]

    def close(self) -> None:
        self.early.close()
        self.drive.close()
        self.link.close()


def assert_equal(ours: Training, theirs: Training) -> None:
    for own, other in zip(ours.states(), theirs.states(), strict=True):
        assert own.keys() == other.keys() and all(torch.equal(own[name], other[name]) for name in own)
    assert all(map(torch.equal, ours.shards, theirs.shards))


@pytest.mark.parametrize("slots", [2, 3, 7])
@pytest.mark.parametrize("seed", range(4))
def test_training_is_that_in_memory_whatever_becomes_of_a_step(tmp_path, seed, slots):
    """Steps that stand, that are taken back, that come late, in an order that changes; iterations that are skipped."""
    draw = random.Random(seed)
    ours, theirs = OnDrive(tmp_path, slots), InMemory()
    theirs.iteration(1.0)
    assert_equal(ours, theirs)
    for iteration in range(12):
        for one in (ours, theirs):
            for gradient, value in zip(one.gradients, made(100 + iteration)):
                gradient.copy_(value)
        factor = draw.choice((1.0, 1.0, 0.5, None))
        order = draw.sample(range(3), 3)
        count = draw.choice((3, 3, 2, 0))
        theirs.iteration(factor)
        ours.iteration(factor, order[:count], order[count:])
        assert all(parameter.isnan().all() for parameter in ours.parameters)
        if draw.random() < 0.7:
            assert_equal(ours, theirs)
    assert_equal(ours, theirs)
    assert 0 < ours.early.taken_back < ours.early.taken
    ours.close()


@faults.injected(no_rollback=1)
def test_the_control_keeps_what_was_clipped(tmp_path):
    for factor in (0.5, None):
        ours, theirs = OnDrive(tmp_path, 3), InMemory()
        theirs.iteration(1.0)
        theirs.iteration(factor)
        ours.iteration(factor, [0, 1, 2])
        with pytest.raises(AssertionError):
            assert_equal(ours, theirs)
        ours.close()


def test_units_are_read_ahead_in_the_order_of_the_last_iteration(tmp_path):
    ours = OnDrive(tmp_path, 3)
    moved, start = [], ours.drive.file.start

    def recorded(memory, offset, what, transfer, before_end=None, *, write=False):
        moved.append((int(what.split()[-1]), write))
        return start(memory, offset, what, transfer, before_end, write=write)

    ours.drive.file.start = recorded
    for factor in (1.0, 0.5, None, 1.0):
        ours.iteration(factor, [2, 0, 1])
    ours.states()  # writes have ended; reads ahead may still begin
    ours.iteration(1.0, [2, 0], [1])
    ours.close()  # reads have ended
    assert [unit for unit, write in moved if write][-4:] == [3, 0, 1, 2]
    # Behind two units that are read ahead when the iteration begins, and up to two of the next one.
    assert [unit for unit, write in moved if not write][-6:] == [3, 0, 1, 2, 3, 0]


def test_waiting_for_the_drive_is_no_part_of_a_step(tmp_path):
    recorder = Recorder(0)
    ours = OnDrive(tmp_path, 3, recorder)
    fetch = ours.drive.fetch
    ours.drive.fetch = lambda unit: (time.sleep(0.2), fetch(unit))
    ours.iteration(1.0, [2, 0], [1])
    ours.close()
    early_and_late = [event.duration_us for event in recorder.events() if event.lane == "host_step"][-len(UNITS) :]
    assert len(early_and_late) == len(UNITS) and max(early_and_late) < 0.1e6


def test_the_drive_has_two_places_for_each_unit(tmp_path):
    ours = OnDrive(tmp_path, 2)
    opened = [file for file in os.scandir("/proc/self/fd") if str(tmp_path) in os.readlink(file.path)]
    assert {file.stat().st_size for file in opened} == {2 * ours.drive.bytes}
    ours.close()


@pytest.mark.parametrize("number", range(1, 6))
@pytest.mark.parametrize("fault", [fault for fault in FAULTS if fault != "killed"])
def test_a_fault_of_the_drive_ends_training_and_no_state_is_used_after_it(tmp_path, monkeypatch, fault, number):
    ours = OnDrive(tmp_path, 3)
    ours.iteration(0.5, [0, 1, 2])
    ours.states()
    drive_faults.install(fault, number, monkeypatch.setattr)
    for _ in range(2):
        with pytest.raises(
            DriveError, match=rf"states [0-9]: the file of process .* in {tmp_path} {FAULTS[fault][-1]}"
        ):
            for factor in (1.0, None, 0.5):
                ours.iteration(factor, [0, 1, 2])
