"""Gradients that rest in host memory are normed and clipped by the processor; a device's kernel sees only its own."""

import gc

import pytest
import torch
from megatron.core.optimizer import clip_grads

from megatron_ext.megatron.host_gradients import ROW, rest_on_host, rests_on_host

NUMELS = [1, 7, ROW, 3 * ROW + 129]


class Kernel:
    """In place of the device's operations, which may not be told of host memory; notes what they are given."""

    def __init__(self, hosted: list[torch.Tensor]):
        self.hosted, self.given = {tensor.data_ptr() for tensor in hosted}, []

    def __call__(self, operation, overflow, lists, *arguments):
        assert not self.hosted & {tensor.data_ptr() for own in lists for tensor in own}, "a kernel reaches host memory"
        self.given.append([len(own) for own in lists])
        if operation is clip_grads.l2_norm_impl:
            squares = sum(tensor.double().square().sum() for tensor in lists[0])
            return squares.sqrt().float().view(1), None
        for source, scaled in zip(*lists):
            scaled.copy_(source * arguments[0])


@pytest.fixture
def gradients(monkeypatch):
    """On the host and on the device, in turn."""
    generator = torch.Generator().manual_seed(3)
    made = [torch.randn(numel, generator=generator) for numel in NUMELS]
    hosted = made[::2]
    kernel = Kernel(hosted)
    monkeypatch.setattr(clip_grads, "multi_tensor_applier", kernel)
    for gradient in hosted:
        rest_on_host(gradient)
    return made, hosted, kernel


def norm(gradients: list[torch.Tensor]) -> torch.Tensor:
    found, _ = clip_grads.multi_tensor_applier(
        clip_grads.l2_norm_impl, torch.zeros(1, dtype=torch.int), [gradients], False
    )
    return found


def scale(gradients: list[torch.Tensor], factor: float) -> None:
    overflow = torch.zeros(1, dtype=torch.int)
    clip_grads.multi_tensor_applier(clip_grads.multi_tensor_scale_impl, overflow, [gradients, gradients], factor)


def test_the_norm_of_both_is_that_of_all_and_the_kernel_sees_the_device_s(gradients):
    made, hosted, kernel = gradients
    exact = sum(gradient.double().square().sum() for gradient in made).sqrt()
    found = norm(made)
    assert found.shape == (1,) and found.dtype is torch.float32
    assert found.item() == pytest.approx(exact.item(), rel=1e-6) and kernel.given == [[2]]
    assert norm(hosted).item() == pytest.approx(sum(g.double().square().sum() for g in hosted).sqrt().item(), rel=1e-6)
    assert kernel.given == [[2]]  # nothing of it is on the device


def test_the_norm_does_not_depend_on_the_number_of_threads(gradients):
    _, hosted, _ = gradients
    hosted.append(torch.randn(40 * ROW + 5, generator=torch.Generator().manual_seed(1)))
    rest_on_host(hosted[-1])
    threads, found = torch.get_num_threads(), []
    for number in (1, 2, 3):
        torch.set_num_threads(number)
        found.append(norm(hosted))
    torch.set_num_threads(threads)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


def test_clipping_is_a_multiplication_to_the_last_bit(gradients):
    made, hosted, kernel = gradients
    hosted[0][0] = 1e-42  # subnormal
    factor = 0.37192
    expected = [gradient * factor for gradient in made]
    scale(made, factor)
    assert all(map(torch.equal, made, expected)) and kernel.given == [[2, 2]]


def test_a_factor_of_one_touches_no_host_memory(gradients):
    """From 0.19 on with Transformer Engine, Megatron scales by a factor on the device also where nothing is clipped."""
    made, hosted, kernel = gradients
    versions = [gradient._version for gradient in hosted]
    scale(made, torch.ones(1))
    assert [gradient._version for gradient in hosted] == versions and kernel.given == [[2, 2]]
    scale(made, torch.full((1,), 0.5))
    assert [gradient._version for gradient in hosted] == [version + 1 for version in versions]


def test_where_nothing_rests_on_the_host_the_kernel_is_given_everything(gradients):
    made, hosted, kernel = gradients
    there = [gradient for gradient in made if not rests_on_host(gradient)]
    assert len(there) == len(made) - len(hosted) == 2
    norm(there)
    scale(there, 0.5)
    assert kernel.given == [[2], [2, 2]]


def test_parts_of_a_storage_rest_there_until_it_is_gone(gradients):
    whole = torch.zeros(100)
    rest_on_host(whole[10:20])
    assert rests_on_host(whole) and rests_on_host(whole[50:])
    del whole
    gc.collect()
    other = torch.frombuffer(bytearray(400), dtype=torch.float32)
    assert not rests_on_host(other)


def test_megatron_s_function_is_replaced_once(gradients):
    _, hosted, kernel = gradients
    divided = clip_grads.multi_tensor_applier
    rest_on_host(hosted[0])
    assert clip_grads.multi_tensor_applier is divided and divided.kernel is kernel
