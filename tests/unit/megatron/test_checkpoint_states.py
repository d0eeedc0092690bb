"""States in distributed checkpoints: Megatron's own code on groups so small that a rank's shard is padding alone."""

import traceback
from functools import partial
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch.distributed.checkpoint import CheckpointException

from megatron_ext.formats.errors import InputError
from megatron_ext.megatron import checkpoint_states
from megatron_ext.runtime import free_host_memory
from megatron_ext.workload.bucket_layout import PARAMETER_ALIGNMENT, bucket_numel

NAMES = (
    "get_parameter_state_dp_reshardable",
    "sharded_param_state_dp_reshardable",
    "load_parameter_state_from_dp_reshardable",
)
RESHARDABLE = "sharded_param_state_fully_reshardable"
WHOLE = "load_parameter_state_from_dp_zero"
STATES = ("param", "exp_avg", "exp_avg_sq")


def optimizer_of(rank: int, ranks: int, buckets: list[list[int]]) -> SimpleNamespace:
    """What Megatron's code reads of an optimizer whose ``buckets`` hold parameters of so many elements."""
    maps, laid_out = [], []
    for numels in buckets:
        total, end, own = bucket_numel(numels, ranks), 0, {}
        size = total // ranks
        for number, numel in enumerate(reversed(numels)):
            begin = end + -end % PARAMETER_ALIGNMENT
            end = begin + numel
            first, last = max(begin, rank * size) - rank * size, min(end, (rank + 1) * size) - rank * size
            if first < last:
                own[f"{len(maps)}.{number}"] = {"gbuf_local": SimpleNamespace(start=first, end=last, size=last - first)}
        maps.append({"param_map": own})
        laid_out.append(SimpleNamespace(numel_unpadded=end, grad_data=torch.empty(total, device="meta")))
    sizes = {name: place["gbuf_local"].size for one in maps for name, place in one["param_map"].items()}
    optimizer = SimpleNamespace(
        data_parallel_group=SimpleNamespace(rank=lambda: rank, size=lambda: ranks),
        buffers=[SimpleNamespace(buckets=laid_out)],
        gbuf_ranges=[{torch.float32: maps}],
        per_bucket_numel=[],
        per_bucket_numel_unpadded=[],
        data_parallel_group_idx=0,
        distributed_optimizer_instance_id=0,
        _get_main_param_and_optimizer_states=lambda name: {state: torch.ones(sizes[name]) for state in STATES},
    )
    optimizer.get_parameter_state_dp_reshardable = lambda: megatrons(0)(optimizer)
    optimizer._set_main_param_and_optimizer_states = lambda name, states: optimizer.loaded.append(name)
    optimizer.loaded = []
    return optimizer


def megatrons(number: int):
    """A method of Megatron's optimizer, with or without what was added to it."""
    return getattr(DistributedOptimizer, NAMES[number])


def written(ranks: int, buckets: list[list[int]]) -> list[torch.Tensor]:
    """Of each bucket, how often each element of its parameters and of what lies between them is written."""
    ends = [bucket.numel_unpadded for bucket in optimizer_of(0, ranks, buckets).buffers[0].buckets]
    counts = [torch.zeros(end) for end in ends]
    for rank in range(ranks):
        state = megatrons(1)(optimizer_of(rank, ranks, buckets), {})
        for number, entries in state[0][torch.float32].items():
            for entry in entries:
                assert len(entry) > 1  # what has no tensors cannot be merged with what was read
                for tensor in (entry[name] for name in ("param", "exp_avg") if name in entry):
                    begin = tensor.global_offset[0]
                    counts[number][begin : begin + tensor.local_shape[0]] += 0.5
    return counts


@pytest.fixture
def megatron_as_it_is(monkeypatch):
    for name in (*NAMES, RESHARDABLE):
        method = getattr(DistributedOptimizer, name)
        monkeypatch.setattr(DistributedOptimizer, name, getattr(method, "of_megatron", method))


@pytest.mark.parametrize(
    ("ranks", "buckets"),
    [
        (2, [[64], [640, 64]]),  # the second rank has padding alone
        (6, [[600], [10, 600]]),  # the last one has, of the first bucket
        (16, [[8, 8, 8], [2048]]),  # shards of 16 elements, padding between the parameters as well
    ],
)
def test_each_element_is_written_once(megatron_as_it_is, ranks, buckets):
    with pytest.raises(AssertionError, match="empty bucket"):
        megatrons(1)(optimizer_of(ranks - 1, ranks, buckets), {})
    checkpoint_states.install()
    checkpoint_states.install()  # of every chunk
    for count in written(ranks, buckets):
        assert count.eq(1).all(), count


@pytest.mark.parametrize("rank", [0, 1])
def test_what_was_written_is_loaded(megatron_as_it_is, rank):
    checkpoint_states.install()
    optimizer = optimizer_of(rank, 2, [[64], [640, 64], [64]])
    read = {0: {torch.float32: {1: [{"padding": False, "exp_avg": torch.ones(1)}] * (2 - rank)}}}
    if rank == 0:
        read[0][torch.float32] |= {0: [{"padding": False}], 2: [{"padding": False}]}
    copy = lambda: optimizer.loaded.append("copied")
    group, states = {"params": ["fused", "torch's"], "step": 7}, {"torch's": {"step": torch.tensor(1.0)}}
    optimizer.optimizer = SimpleNamespace(_sync_hdo_state_to_sub_optimizers=copy, param_groups=[group], state=states)
    megatrons(2)(optimizer, read)
    names = [name for maps in optimizer.gbuf_ranges[0][torch.float32] for name in maps["param_map"]]
    assert optimizer.loaded == [*names, "copied"]  # to the parameters that the host steps
    assert states == {"torch's": {"step": 7}}


def test_states_of_format_torch_reach_the_parameters_that_the_host_steps_and_the_model(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_stream", MagicMock())
    monkeypatch.setattr(torch.Tensor, "is_cuda", False)  # also where another test has put the host in a device's place
    classes = dict.fromkeys(("cpu_optimizer_cls", "gpu_optimizer_cls"), torch.optim.AdamW)
    model = torch.zeros(3).bfloat16()
    hybrid = HybridDeviceOptimizer(
        [{"params": [model], "step": 7}], param_update_in_fp32=True, overlap_cpu_optimizer_d2h_h2d=False, **classes
    )
    read = {name: torch.rand(3) for name in ("master_param", "exp_avg", "exp_avg_sq", "step")}
    monkeypatch.setattr(DistributedOptimizer, WHOLE, lambda one, state: one.optimizer.state[model].update(state))
    checkpoint_states.install()
    getattr(DistributedOptimizer, WHOLE)(SimpleNamespace(optimizer=hybrid), read)
    ((stepped, states),) = hybrid.cpu_optimizers[0].state.items()
    assert states.pop("step").eq(7).all()
    assert states.items() < read.items() and torch.equal(stepped, read["master_param"])
    assert torch.equal(model, read["master_param"].bfloat16())


@pytest.mark.parametrize("what, error", [("p.bucket_idx_0.exp_avg", InputError), ("p.weight", CheckpointException)])
def test_states_of_other_groups_are_refused_in_one_line(megatron_as_it_is, monkeypatch, what, error):
    """By size, where all ranks read; by number, where each sets its own."""
    failed = CheckpointException("plan", {1: (ValueError(f"Global shape mismatch: {what}"), traceback.extract_stack())})
    monkeypatch.setattr(dist_checkpointing, "load", MagicMock(spec=[], side_effect=failed))
    by_buffer = AssertionError("Number of unpadded elements must be same")  # of --ckpt-format torch
    monkeypatch.setattr(DistributedOptimizer, WHOLE, MagicMock(spec=[], side_effect=by_buffer))
    checkpoint_states.install()
    with pytest.raises(error, match="^--load: the checkpoint stores" if error is InputError else what):
        dist_checkpointing.load({}, "iter_4")
    by_bucket = {"per_bucket_numel_unpadded": [{torch.float32: [64, 64]}]}
    for load in (megatrons(2), getattr(DistributedOptimizer, WHOLE)):
        with pytest.raises(InputError, match="^--load: the checkpoint stores"):
            load(optimizer_of(0, 2, [[64]]), by_bucket)


def test_states_without_empty_shards_are_megatrons(megatron_as_it_is):
    optimizer = optimizer_of(1, 2, [[256], [300, 300]])
    as_it_is = optimizer.get_parameter_state_dp_reshardable()
    checkpoint_states.install()
    assert str(optimizer.get_parameter_state_dp_reshardable()) == str(as_it_is)


def test_states_of_padded_buckets_are_those_of_their_parameters(megatron_as_it_is):
    """Three buckets of 64, 704 and 64 elements, padded to 128, 768 and 128."""
    places = {torch.empty(64): (0, 64, 0), torch.empty(640): (128, 768, 1), torch.empty(64): (768, 832, 1)}
    places[torch.empty(64)] = (896, 960, 2)
    buffer = SimpleNamespace(
        param_index_map=places,
        bucket_indices=[(0, 128), (128, 896), (896, 1024)],
        buckets=[SimpleNamespace(numel_unpadded=numel) for numel in (64, 704, 64)],
        numel_unpadded=832,
    )
    optimizer = SimpleNamespace(buffers=[buffer], gbuf_ranges=[{torch.float32: []}])
    gathered = {"param": torch.arange(832.0), "numel_unpadded": 832}
    optimizer.get_parameter_state_dp_zero = lambda **_: [{torch.float32: gathered}]
    model = {str(i): ShardedTensor.from_rank_offsets(str(i), parameter) for i, parameter in enumerate(places)}

    def firsts() -> list[float]:
        write = getattr(DistributedOptimizer, RESHARDABLE)
        return [state["param"].data[0].item() for state in write(optimizer, model, False, {}).values()]

    right = [0, 64, 704, 768]
    assert firsts() != right
    checkpoint_states.install()
    checkpoint_states.install()  # of every chunk
    assert firsts() == right and buffer.param_index_map is places


@pytest.mark.parametrize("rank, all_ranks, refused", [(0, False, True), (1, True, True), (1, False, False)])
def test_a_format_that_gathers_all_states_is_refused_where_they_do_not_fit(monkeypatch, rank, all_ranks, refused):
    monkeypatch.setattr(DistributedOptimizer, "get_parameter_state_dp_zero", lambda *_, **given: given)
    checkpoint_states.refuse_without_room()
    checkpoint_states.refuse_without_room()  # of every chunk
    optimizer = optimizer_of(rank, 2, [[640, 64], [1000]])
    optimizer.buffers[0].numel_unpadded = 1704
    gather = partial(DistributedOptimizer.get_parameter_state_dp_zero, optimizer, return_on_all_ranks=all_ranks)
    monkeypatch.setattr(free_host_memory, "available_bytes", lambda: 12 * 1704)
    assert gather() == {"return_on_all_ranks": all_ranks}
    monkeypatch.setattr(free_host_memory, "available_bytes", lambda: 12 * 1704 - 5)
    if refused:
        with pytest.raises(InputError, match=r"gathered .* need 20448 bytes of host memory, 5 bytes short"):
            gather()
    else:
        gather()
