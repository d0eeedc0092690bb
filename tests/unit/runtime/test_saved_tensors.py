"""What autograd saves is counted once a storage, until it is freed; and the census made of it."""

import torch

from megatron_ext.runtime.census import Census, storage_bytes
from megatron_ext.runtime.group import Residency
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


def test_the_census_is_the_sum_at_its_peak():
    residency = Residency()
    weight = torch.ones(8, 8, requires_grad=True)
    census = Census(residency, [weight], lambda: ({"shards": 7}, {"host_copies": 5}))
    residency.add(1000)
    census.begin()
    (torch.ones(4, 8) @ weight).sum().backward()  # 128 bytes beside 1000
    residency.add(-900)
    residency.add(50)  # more parameters, at a moment without activations
    census.end(residency.peak)
    memory = census.memory()
    assert memory.device_bytes == {"whole_parameters": 1000, "shards": 7, "activations": 128}
    assert memory.host_bytes == {"host_copies": 5} and memory.device_total_bytes == 1135
    census.begin()
    census.end(1200)
    assert census.memory().device_bytes["whole_parameters"] == 1200


def test_views_of_one_storage_count_once():
    whole = torch.zeros(16)
    assert storage_bytes([whole[:8], whole[8:], None]) == 64
