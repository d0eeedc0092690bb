"""What autograd saves is counted once a storage, until it is freed; and the census made of it."""

import torch
from engine_stand_in import FusedLinear

from megatron_ext.runtime.census import Census, storage_bytes
from megatron_ext.runtime.group import WholeBytes
from megatron_ext.runtime.saved_tensors import SavedTensors


def test_saved_bytes_are_counted_once_a_storage_and_freed_by_backward():
    weight = torch.ones(8, 8, requires_grad=True)
    x = torch.ones(4, 8, requires_grad=True)
    with SavedTensors([weight]) as saved:
        y = x @ weight  # saves x (and the weight, which does not count)
        assert saved.bytes == x.numel() * 4
        z = torch.exp(y) * y.view(4, 8)  # saves exp(y) twice, and y through a view
        assert saved.bytes == 3 * x.numel() * 4
        gradient, other = weight.grad, x.grad
    z.sum().backward()
    assert gradient is None and other is None and x.grad is not None
    assert saved.bytes == 0 and saved.peak == 3 * x.numel() * 4


def test_gradients_are_those_without_counting():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Softmax(-1), torch.nn.Linear(8, 8))
    x = torch.randn(4, 8)
    model(x).pow(2).sum().backward()
    plain = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    with SavedTensors(model.parameters()) as saved:
        model(x).pow(2).sum().backward()
    assert saved.bytes == 0 and saved.peak > 0
    assert all(torch.equal(p.grad, before) for p, before in zip(model.parameters(), plain))


def test_fused_weight_gradients_find_their_parameter():
    """A layer that adds its weight's gradient inside backward marks the parameter, which hooks would have replaced."""
    flat = torch.randn(32)  # two parameters of one bucket
    weights = [torch.nn.Parameter(flat[:16].view(4, 4)), torch.nn.Parameter(flat[16:].view(4, 4))]
    for weight in weights:
        weight.main_grad, weight.grad_added_to_main_grad = torch.zeros(4, 4), False
    x = torch.randn(2, 4)
    with SavedTensors(weights) as saved:
        FusedLinear.apply(FusedLinear.apply(x, weights[0]), weights[1]).sum().backward()
    assert all(weight.grad_added_to_main_grad and weight.grad is not None for weight in weights)
    expected = torch.autograd.grad(
        (x @ (first := weights[0].detach().requires_grad_()).t() @ flat[16:].view(4, 4).t()).sum(), first
    )
    assert torch.equal(weights[0].main_grad, expected[0])
    assert saved.bytes == 0 and saved.peak == 2 * 2 * 4 * 4
    assert "saved_tensors" not in vars(torch.autograd.function.BackwardCFunction)


def test_the_census_is_the_sum_at_its_peak():
    residency = WholeBytes()
    weight = torch.ones(8, 8, requires_grad=True)
    census = Census(residency, [weight], lambda: ({"shards": 7}, {"host_copies": 5}))
    residency.add(1000)
    census.begin()
    (torch.ones(4, 8) @ weight).sum().backward()  # 128 bytes beside 1000
    residency.add(-900)
    residency.add(50)  # more parameters, at a moment without activations
    census.end()
    memory = census.memory()
    assert memory.device_bytes == {"whole_parameters": 1000, "shards": 7, "activations": 128}
    assert memory.host_bytes == {"host_copies": 5} and memory.device_total_bytes == 1135
    census.begin()
    residency.peak = 1200
    census.end()
    assert census.memory().device_bytes["whole_parameters"] == 1200


def test_views_of_one_storage_count_once():
    whole = torch.zeros(16)
    assert storage_bytes([whole[:8], whole[8:], None]) == 64
