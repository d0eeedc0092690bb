"""The optimizer's views of buckets that come and go."""

import copy
from types import SimpleNamespace

import pytest
import torch

from megatron_ext.formats.errors import InputError
from megatron_ext.megatron.chunk_state import guard_state
from megatron_ext.megatron.shards import ShardOf, hold_shards, offloaded_shards
from megatron_ext.runtime.group import FreedGroup, RankGroup, WholeBytes
from megatron_ext.runtime.publisher import Target, by_thread


class Optimizer:
    """What is used of Megatron's distributed optimizer: one bucket with two fp32 parameters, of
    which data-parallel rank 1 of 2 updates the elements from 96 to 160 of the second."""

    def __init__(self):
        whole = torch.arange(192, dtype=torch.float32)
        self.parameters = [torch.nn.Parameter(torch.empty(64)), torch.nn.Parameter(torch.empty(96))]
        self.parameters[0].data, self.parameters[1].data = whole[:64], whole[64:160]
        self.bucket = SimpleNamespace(param_data=whole)
        self.buffers = [SimpleNamespace(buckets=[self.bucket])]
        self.model_param_gbuf_map = {self.parameters[1]: (0, torch.float32, 0)}
        self.model_fp32_groups = [[self.parameters[1]]]
        self.shard_fp32_groups = [[self.parameters[1].detach()[32:96]]]
        self.model_float16_groups = self.shard_float16_groups = []
        self.optimizer = SimpleNamespace()
        self.group = FreedGroup(5, "chunk 0", whole, dp_rank=1, dp_size=2, residency=WholeBytes())

    def _get_model_param_range_map(self, parameter):
        return {"gbuf_world_in_bucket": SimpleNamespace(start=96, end=160)}


def test_the_optimizer_updates_the_shard_while_the_bucket_is_freed():
    optimizer = Optimizer()
    known = optimizer.shard_fp32_groups[0][0]
    hold_shards([optimizer], [(optimizer.bucket, optimizer.group)])
    optimizer.group.drop()
    known.mul_(2)
    assert torch.equal(optimizer.group.shard[:64], torch.arange(96, 160) * 2.0)
    place = optimizer._get_model_param_range_map(None)["gbuf_world_in_bucket"]
    written = optimizer.bucket.param_data.view(-1)[place.start : place.end]
    assert written.data_ptr() == known.data_ptr()
    assert optimizer.bucket.param_data.numel() == 192


@pytest.mark.parametrize("index", [slice(95, 100), slice(150, 193)])
def test_elements_of_other_ranks_are_out_of_reach(index):
    group = Optimizer().group
    with pytest.raises(AssertionError, match="outside of the own shard"):
        ShardOf(group.shard, group.shard_start, group.whole.numel())[index]


def test_a_freed_model_has_no_state_to_save():
    """torch.save of a freed parameter succeeds, and the file can never be loaded."""
    optimizer = Optimizer()
    module = torch.nn.Module()
    module.weight = optimizer.parameters[0]
    module.sharded_state_dict = lambda: {"weight": module.weight}
    guard_state(module, [optimizer.group])
    assert set(module.state_dict()) == set(module.sharded_state_dict()) == {"weight"}
    optimizer.group.drop()
    for state in (module.state_dict, module.sharded_state_dict):
        with pytest.raises(
            InputError, match=r"test_shards.py:\d+ in .* while group 5 \(chunk 0\) is sharded: do this on all"
        ):
            state()


def test_copies_of_an_offloaded_optimizer_are_found_anew_each_time():
    optimizer = Optimizer()
    shard = optimizer.shard_fp32_groups[0][0]
    groups = [(optimizer.bucket, optimizer.group)]
    assert offloaded_shards([optimizer], groups) == {}
    optimizer.optimizer.gpu_params_map_cpu_copy = {}
    find = offloaded_shards([optimizer], groups)[5]
    for own in (torch.zeros(64), torch.ones(64)):
        optimizer.optimizer.gpu_params_map_cpu_copy[shard] = own
        assert find() == [(0, own)]


def test_all_ranks_publish_a_group_in_one_way_even_if_a_shard_is_padding():
    """Otherwise the stream of the rank with such a shard would wait for flags that threads of the others store."""
    optimizer = Optimizer()
    padding = RankGroup(6, "chunk 0", torch.zeros(128), dp_rank=1, dp_size=2)
    groups = [(optimizer.bucket, optimizer.group), (SimpleNamespace(), padding)]
    assert offloaded_shards([optimizer], groups) == {}
    optimizer.optimizer.gpu_params_map_cpu_copy = {}
    source = offloaded_shards([optimizer], groups)
    assert source[6]() == []
    targets = [Target(group, True, False, source.get(group.index)) for _, group in groups]
    assert by_thread(targets) == {5, 6}


class Chunk(torch.nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.weight = weight

    def sharded_state_dict(self):
        return {"weight": self.weight}


def test_a_deep_copy_of_a_model_has_its_own_state():
    optimizer = Optimizer()
    chunk = Chunk(optimizer.parameters[0])
    guard_state(chunk, [optimizer.group])
    copied = copy.deepcopy(chunk)
    optimizer.group.drop()
    for state in (copied.state_dict(), copied.sharded_state_dict()):
        assert torch.equal(state["weight"], torch.arange(64.0))
    with pytest.raises(InputError, match="saves or copies parameters"):
        chunk.sharded_state_dict()


def test_a_model_without_memory_is_not_copied():
    """Reading a parameter that is freed ends the process where there is no device."""
    optimizer = Optimizer()
    model = torch.nn.Sequential(Chunk(optimizer.parameters[0]))
    guard_state(model, [optimizer.group])
    optimizer.group.drop()
    with pytest.raises(InputError, match=r"saves or copies parameters while group 5 \(chunk 0\) is sharded"):
        copy.deepcopy(torch.nn.Sequential(model))  # within what wraps it
