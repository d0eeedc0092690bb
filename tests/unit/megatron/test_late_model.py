"""Groups of a model that never fits whole have bytes while somebody uses them, before training begins."""

from types import SimpleNamespace

import pytest
import torch

from megatron_ext.formats.errors import InputError
from megatron_ext.megatron import late_model
from megatron_ext.megatron.late_model import LateModel
from megatron_ext.runtime import free_host_memory

SCHEDULE = SimpleNamespace(
    groups=[SimpleNamespace(pp_rank=0, model_chunk_id=0, bytes=64, shard_rests=rests) for rests in (None, "host")],
    parallel=SimpleNamespace(node_size=2, world_size=2),
)
REPLICAS = SimpleNamespace(size=lambda: 2, rank=lambda: 1)


@pytest.fixture
def built(monkeypatch):
    """A module whose two parameters are groups of their own, of the second of two replicas."""
    monkeypatch.setattr(late_model.dist, "get_global_rank", lambda group, rank: rank)
    monkeypatch.setattr(late_model.dist, "broadcast", lambda whole, src, group: None)
    late, module = LateModel(SCHEDULE, pp_rank=0), torch.nn.Module()
    for index, name in enumerate(("weight", "bias")):
        whole = torch.arange(16.0) + 100 * index
        setattr(module, name, torch.nn.Parameter(whole, requires_grad=False))
        getattr(module, name).data = whole
        late.hold(index, whole, REPLICAS)
    yield late, module
    late.close()


def bytes_of(late) -> list[int]:
    with late.reads.suspended():
        return [group.whole.untyped_storage().nbytes() for group in late.groups.values()]


def test_a_use_gives_bytes_to_its_group_alone_with_the_own_part(built):
    late, module = built
    assert bytes_of(late) == [0, 0]
    views = [module.weight.detach()[8:], module.bias.view(-1)[8:]]
    assert bytes_of(late) == [0, 64]
    for index in (0, 1, 0):
        assert views[index].tolist() == [*range(100 * index + 8, 100 * index + 16)]
        assert bytes_of(late) == [64 * (index == 0), 64 * (index == 1)]
    assert (module.weight + module.bias)[8:].tolist() == [100 + 2 * i for i in range(8, 16)]
    assert bytes_of(late) == [64, 64], "one call uses both"
    late.close()
    assert bytes_of(late) == [0, 0]


def test_a_module_whose_parameters_are_of_two_groups_is_loaded(built):
    late, module = built
    module.load_state_dict({name: torch.arange(16.0) - 7 for name in ("weight", "bias")})
    late.close()
    assert [group.shard.tolist() for group in late.groups.values()] == [[*range(1, 9)]] * 2


def test_an_optimizer_gets_the_shard_unless_that_rests_on_the_host(built):
    late, module = built
    views = [parameter.detach()[8:12] for parameter in module.parameters()]
    late.point_at_shards(views)
    late.close()
    places = [view.untyped_storage()._cdata for view in views]
    assert places == [late.rest_of(index).untyped_storage()._cdata for index in (0, 1)]
    assert views[0].tolist() == [8, 9, 10, 11] and late.rest_of(1) is late.groups[1].whole


def test_host_memory_that_cannot_hold_the_parameters_of_a_node_is_named(monkeypatch):
    monkeypatch.setattr(free_host_memory, "available_bytes", lambda: 250)
    with pytest.raises(InputError, match="2 ranks, which never fit .* need 256 bytes of host memory, 6 bytes short"):
        LateModel(SCHEDULE, pp_rank=0)
