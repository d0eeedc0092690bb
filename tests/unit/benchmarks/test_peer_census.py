"""The census of peers.py: storages that Python can reach, each once, without activations and what rests on the host."""

import torch
from torch import nn


class TransformerLayer(nn.Linear):
    """The census looks at modules of this name."""


class ShardedLayer(TransformerLayer):
    """As FSDP2 replaces a layer's class."""


def counted(modules, host, work) -> tuple[int, int]:
    import peer_census  # with torch.distributed.tensor, which every worker would import to collect

    census = peer_census.Census(modules, lambda: host)
    census.begin()
    work()
    return census.end()


def test_parameters_gradients_and_states_count_and_activations_and_host_memory_do_not(monkeypatch):
    monkeypatch.setattr("peer_census.COLLECTIVES", ())  # torch's own functions stay as they are
    before, _ = counted([], [], lambda: None)
    model = nn.Sequential(*(ShardedLayer(1000, 1000, bias=False) for _ in range(2)))
    shard, states, batch = torch.zeros(500_000), torch.zeros(250_000), torch.zeros(100, 1000)
    views = [states[:10], states[10:], shard[1:]]

    def train():
        model(batch).sum().backward()

    device, host = counted([model], [shard], train)
    parameters, gradient, activation = 8_000_000, 4_000_000, 400_000
    expected = (
        parameters + gradient + 1_000_000 + activation
    )  # states and the batch; one gradient in a layer's backward
    assert len(views) == 3 and host == 2_000_000
    assert abs(device - before - expected) <= 2 * activation
