"""Where gradients lie in the storage that rests on the device."""

import itertools
from types import SimpleNamespace

import pytest
import torch

from megatron_ext.megatron import buckets
from megatron_ext.megatron.shards import ShardOf
from megatron_ext.workload.bucket_layout import bucket_numel

KEPT = [None, "sharded", "host", "sharded", None, "sharded", None]


class Buffer(buckets.upstream._ParamAndGradBuffer):
    """What is used of Megatron's."""

    grad_dtype = torch.float32

    def __init__(self, rank: int, dp: int):
        self.data_parallel_world_size, self.data_parallel_group = dp, SimpleNamespace(rank=lambda: rank)
        self.extra_main_grads = []  # since 0.19


@pytest.mark.parametrize("rank, dp", [(0, 1), (3, 4), (1, 32), (31, 32), (0, 64), (3, 64), (63, 64), (5, 128)])
def test_what_a_kernel_reads_at_once_begins_where_it_does_in_megatron_s_buffer(rank, dp):
    """Otherwise it adds up squares in another order, and the norm differs from the reference's in the last bits."""
    ends = list(itertools.accumulate(bucket_numel([100 + number], dp) for number in range(len(KEPT))))
    ranges = [(begin, end, 0) for begin, end in zip([0, *ends], ends)]
    buffer = Buffer(rank, dp)
    gradients = buckets.resting_gradients(buffer, ranges, KEPT, torch.device("cpu"))
    used = needed = 0
    for (begin, end, _), keeps, own in zip(ranges, KEPT, gradients, strict=True):
        size = end - begin if keeps is None else (end - begin) // dp
        place = begin if keeps is None else begin + rank * size
        assert own.numel() == size
        if keeps != "host":
            assert own.storage_offset() >= used and own.storage_offset() % 4 == place % 4
            used, needed = own.storage_offset() + size, needed + size
    assert [len(own) for own in buffer.host_shards] == [len(gradients[KEPT.index("host")])]
    assert buffer.grad_data.numel() == used and (used == needed if dp <= 32 else used < needed + 4 * len(KEPT))


def test_buckets_lie_as_the_models_parameters_do_whatever_the_order_of_groups():
    """Or a schedule that lists equal layers in another order loads the optimizer states of one as those of another."""
    one, two, three = (torch.nn.Parameter(torch.zeros(1)) for _ in range(3))
    buffer = SimpleNamespace(params=[one, two, three])
    assert buckets.groups_by_bucket(buffer, {4: [two], 5: [three], 6: [one]}) == [5, 4, 6]


def test_a_gradient_that_is_brought_to_the_device_begins_there_as_in_megatron_s_buffer():
    gradient = torch.arange(100.0)
    standing = ShardOf(gradient, -66, 166, torch.device("cpu"))  # a parameter of which the shard has the end
    for start in range(8):
        found = standing[slice(start, 30)]
        assert torch.equal(found, gradient[start + 66 : 96]) and found.storage_offset() == start % 4


class OnDevice(torch.Tensor):
    """Looks as if it lay on a CUDA device."""

    device = SimpleNamespace(type="cuda")  # torch.device gives another where a processor plays a device


@pytest.mark.parametrize(("dtype", "factor"), [(torch.bfloat16, 1 / 3), (torch.float32, 1 / 3)])
@pytest.mark.parametrize("on_device", [True, False])
def test_a_gradient_in_host_memory_is_scaled_by_the_factor_that_a_kernel_takes(dtype, factor, on_device):
    """A kernel casts a factor that lies on the device to the gradient's type, and takes one that does not as it is."""
    buffer = Buffer(0, 1)
    buffer.grad_dtype = dtype
    shards = buckets.resting_gradients(buffer, [(0, 64, 0)], ["host"], torch.device("cpu"))
    shards[0].copy_(torch.linspace(1, 2, 64))
    taken = torch.tensor(factor, dtype=dtype if on_device else torch.float32)
    expected = (shards[0].float() * taken.float()).to(dtype)
    scale = torch.tensor(factor)
    buffer.scale_gradients(scale.as_subclass(OnDevice) if on_device else scale)
    assert torch.equal(shards[0], expected)
