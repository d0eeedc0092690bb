"""Steps of many parameters by few calls: those of torch's AdamW, to the last bit."""

import pytest
import torch

from megatron_ext.runtime.host_step import flat_adamw
from megatron_ext.runtime.host_step.flat_adamw import FlatAdamW, joined, lay_out_parameters, runs
from megatron_ext.runtime.page_locked import large_tensor

SIZES = [64, 128, 7, 640, 64, 1, 64, 64, 4096, 65, 64]
DECAYING = 5
"""The first so many have weight decay."""


@pytest.fixture
def calls(monkeypatch):
    """Elements of the tensors that each call of the kernel is given."""
    found, step = [], flat_adamw.adamw

    def noted(parameters, *rest, **how):
        found.append([parameter.numel() for parameter in parameters])
        step(parameters, *rest, **how)

    monkeypatch.setattr(flat_adamw, "adamw", noted)
    return found


class Pair:
    """The same parameters for both optimizers; gradients lie behind each other, as in a room."""

    def __init__(self, settings: dict):
        generator = torch.Generator().manual_seed(0)
        self.theirs = [torch.randn(size, generator=generator) for size in SIZES]
        self.ours = [parameter.clone() for parameter in self.theirs]
        self.optimizers = [
            kind([{"params": own[:DECAYING]}, {"params": own[DECAYING:], "weight_decay": 0.0}], **settings, fused=True)
            for kind, own in ((torch.optim.AdamW, self.theirs), (FlatAdamW, self.ours))
        ]

    def step(self, seed: int, without: tuple[int, ...] = ()) -> None:
        gradient = torch.randn(sum(SIZES), generator=torch.Generator().manual_seed(seed)).split(SIZES)
        for number, (theirs, ours) in enumerate(zip(self.theirs, self.ours, strict=True)):
            theirs.grad = None if number in without else gradient[number].clone()
            ours.grad = None if number in without else gradient[number]
        for optimizer in self.optimizers:
            optimizer.step()

    def assert_equal(self) -> None:
        states = [[one.state[p] for p in own] for one, own in zip(self.optimizers, (self.theirs, self.ours))]
        assert all(map(torch.equal, self.theirs, self.ours))
        for theirs, ours in zip(*states, strict=True):
            assert theirs.keys() == ours.keys()
            assert all(torch.equal(theirs[name], ours[name]) for name in theirs)
            assert all(theirs[name].dtype == ours[name].dtype for name in theirs)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(
    "settings", [{"lr": 1e-2}, {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-5, "weight_decay": 0.1}]
)
def test_steps_are_those_of_torch(calls, settings, threads):
    """Whole runs are one tensor; one whose elements fill no vector ends a run, for torch rounds these otherwise."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        pair = Pair(settings)
        lay_out_parameters(pair.optimizers[1], large_tensor)
        for iteration in range(3):
            pair.step(iteration)
            pair.assert_equal()
        assert calls == [[199, 704], [1, 4289, 64]] * 3
    finally:
        torch.set_num_threads(before)


def test_a_parameter_without_gradient_parts_what_is_stepped_together_from_then_on(calls):
    pair = Pair({"lr": 1e-2})
    lay_out_parameters(pair.optimizers[1], large_tensor)
    pair.step(0)
    pair.step(1, without=(1, 8))
    pair.assert_equal()
    assert calls[2:] == [[64, 7, 704], [1, 128, 65, 64]]
    pair.step(2)
    pair.assert_equal()
    assert calls[4:] == [[64, 128, 7, 704], [1, 128, 4096, 65, 64]]


def test_states_that_a_checkpoint_gave_are_kept():
    pair = Pair({"lr": 1e-2})
    pair.step(0)
    lay_out_parameters(pair.optimizers[1], large_tensor)
    pair.step(1)
    pair.assert_equal()


def test_without_new_memory_steps_are_the_same(calls):
    """Of states on the drive, for example, which come to slots."""
    pair = Pair({"lr": 1e-2})
    pair.step(0)
    pair.assert_equal()
    assert calls == [SIZES[:DECAYING], SIZES[DECAYING:]]


def test_neighbours_in_two_storages_are_not_one_tensor():
    memory = bytearray(1024)
    first, second = (torch.frombuffer(memory, dtype=torch.float32, count=64, offset=256 * n) for n in range(2))
    assert second.data_ptr() == first.data_ptr() + first.nbytes
    assert list(runs([(first,), (second,)])) == [(0, 1), (1, 2)]
    parts = torch.arange(192.0).split(64)
    assert list(runs([(part,) for part in parts], [1, 1, 2])) == [(0, 2), (2, 3)]
    (whole,) = joined([(part,) for part in parts[:2]])
    assert torch.equal(whole, torch.arange(128.0))
