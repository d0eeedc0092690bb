"""Which groups the host's optimizer may step during the backward, what a checkpoint has of states on the drive, and
that the slots and buffers of a step take the bytes that are billed."""

import random
from types import SimpleNamespace

import pytest
import torch
from draw_schedule import draw_schedule, states_on_device, states_on_drive, with_gradients, with_step_slots
from msgspec.structs import replace
from planning_cases import make_workload
from variations import some

from megatron_ext.megatron.host_optimizers import own_optimizers
from megatron_ext.megatron.scheduled_host_step import HostStep, added_up_later, save_from_drive
from megatron_ext.runtime.host_step import room
from megatron_ext.runtime.host_step.flat_adamw import lay_out_parameters
from megatron_ext.runtime.host_step.room import Piece
from megatron_ext.runtime.host_step.unit import HostUnit
from megatron_ext.runtime.page_locked import large_tensor
from megatron_ext.runtime.recorder import NOTHING
from megatron_ext.schedule.group_facts import members_of, shard_numel
from megatron_ext.schedule.host_slots import LARGE_SLOT_BYTES, state_slots_bytes
from megatron_ext.schedule.match import match
from megatron_ext.schedule.memory_bill import memory_bill
from megatron_ext.schedule.validate import validate
from megatron_ext.workload.optimizer_settings import OptimizerSettings


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", ["q_layernorm.weight", "k_layernorm.bias", "linear_qkv.layer_norm_weight"])
def test_what_tensor_parallel_ranks_add_up_behind_the_reduce_waits(ranks, name):
    """Megatron's finalize_model_grads does, whether --sequence-parallel is given or not. One element that another rank
    adds nothing to would let the step stand."""
    parameter = torch.nn.Parameter(torch.zeros(1))
    late = added_up_later([parameter], ["decoder.layers.0.self_attention.linear_proj.weight", name], ranks)
    assert late == (ranks > 1 and not name.startswith("linear"))
    vars(parameter)["sequence_parallel"] = True
    assert added_up_later([parameter], [name], ranks)


def test_a_run_that_was_loaded_saves_states_of_the_drive_again():
    """Megatron 0.16 leaves among the states of a parameter what its format says of the shard: a bool."""
    shard, copy, step = torch.zeros(2), torch.zeros(2), torch.tensor(3.0)
    states = {"step": step, "exp_avg": torch.ones(2), "padding": False}
    optimizer = SimpleNamespace(
        _get_main_param_and_optimizer_states=lambda parameter: states,
        model_param_group_index_map={"weight": (0, 0)},
        optimizer=SimpleNamespace(param_groups=[{"params": [shard]}], gpu_params_map_cpu_copy={shard: copy}),
    )
    on_drive = {"param": torch.full((2,), 5.0), "exp_avg": torch.full((2,), 7.0)}
    drive = SimpleNamespace(unit_of=lambda parameter: parameter is copy or None, read_tensors=lambda copy: on_drive)
    save_from_drive(optimizer, drive)
    assert optimizer._get_main_param_and_optimizer_states("weight") == {"step": step, **on_drive}


def test_a_loaded_optimizer_has_states_that_can_be_taken_back():
    """Megatron's torch_dist checkpoints leave a bool among them, of which no copy can be made."""
    parameter, moments = torch.zeros(2), {"exp_avg": torch.ones(2), "exp_avg_sq": torch.ones(2)}
    before = torch.optim.AdamW([parameter], fused=True)
    before.state[parameter] = {"step": torch.ones(()), **moments, "padding": False, "master_param": parameter}
    hybrid = SimpleNamespace(cpu_optimizer_cls=torch.optim.AdamW, cpu_optimizers=[before])
    (own,) = own_optimizers(hybrid, [[{**before.param_groups[0], "params": [parameter]}]])
    assert hybrid.cpu_optimizers == [own] and own.state[parameter].keys() == {"step", *moments}
    lay_out_parameters(own, large_tensor)
    unit = HostUnit(0, own, [Piece(parameter, lambda: None, torch.zeros(2, dtype=torch.bfloat16), False, False)], None)
    assert unit.rollback_bytes() == 4 * 64


def drawn_slots(seed: int):
    """A schedule with step slots of up to gigabytes, states of drawn groups on the drive or the device, and its
    workload."""
    draw = random.Random(seed)
    pp, hidden = draw.choice((1, 2)), draw.choice((64, 1024, 8192))
    order = "1f1b" if pp == 2 else "no_pipeline"
    work = make_workload(pp=pp, vp=1, dp=draw.choice((1, 2, 8)), order=order, hidden=hidden, layers=3 * pp)
    settings = OptimizerSettings(on_host=True, gradient_dtype=draw.choice(("float32", "bfloat16")))
    work = replace(work, zero_stage=draw.choice((1, 2, 3)), optimizer=settings)
    schedule = with_gradients(draw, draw_schedule(draw, work), work, (None, "sharded"))
    share, every = draw.choice((0.0, 0.4, 0.9)), range(len(schedule.groups))
    schedule = states_on_drive(schedule, work, [i for i in every if i and draw.random() < share], slots=2)
    if work.zero_stage > 1:
        rest = [i for i in every if i and schedule.groups[i].states_rest is None and draw.random() < 0.5]
        schedule = states_on_device(schedule, rest)
    cast, gradients = draw.choice(("host", "device", "device")), draw.choice((1, 1.7, 40))
    schedule = with_step_slots(schedule, work, slots=draw.choice((2, 4)), cast=cast, gradients=gradients)
    match(validate(schedule), work)
    return schedule, work


def held_by_step(schedule, work, pp_rank: int) -> tuple[int, int]:
    """Bytes on the device and in host memory. Tensors of ``meta`` have a size and no memory."""
    dtype, place = getattr(torch, work.optimizer.gradient_dtype), torch.device("meta")
    own = {index: group for index, group in enumerate(schedule.groups) if group.pp_rank == pp_rank}
    groups, buckets = {}, {}
    for index, group in own.items():
        shard = torch.empty(shard_numel(group, work), device=place)
        groups[index] = SimpleNamespace(shard=shard, whole=shard)
        params = [torch.empty(numel, device=place) for numel in members_of(group, work).numels]
        bucket = SimpleNamespace(grad_data=torch.empty(0, dtype=dtype))
        buckets[index] = SimpleNamespace(params=params, buckets=[bucket])
    device = SimpleNamespace(
        stream=lambda name: SimpleNamespace(),
        event=lambda: None,
        host_tensor=lambda size, dtype: torch.empty(size, dtype=dtype, device=place),
    )
    rank = dict(schedule=schedule, device=device, groups=groups, bucket_groups=buckets, links=NOTHING)
    step = HostStep(SimpleNamespace(**rank, delay=None, optimizers=[], buckets=[]), None)  # type: ignore[arg-type]
    return step.link.device_bytes, step.held_bytes()["staging_slots"]


def test_slots_and_buffers_of_the_step_take_what_is_billed(monkeypatch):
    """In large cases too: parameters are cast in parts, 16-bit gradients of the drive's and of the memory's groups
    become fp32 in one buffer, and a rank without states in host memory casts nothing."""
    monkeypatch.setattr(room, "private_flags", lambda number, device: [None] * number)
    large = beside = 0
    for seed in some(range(200), 40):
        schedule, work = drawn_slots(seed)
        assert schedule.step_slots is not None
        for pp_rank, bill in enumerate(memory_bill(schedule, work)):
            own = [group for group in schedule.groups if group.pp_rank == pp_rank]
            of_drive, memory = state_slots_bytes(schedule, work, own), bill.memory
            billed = memory.device_bytes.get("buffers", 0), memory.host_bytes.get("staging_slots", 0) - of_drive
            assert held_by_step(schedule, work, pp_rank) == billed, (seed, pp_rank)
            casts = schedule.step_slots.cast == "device"
            large += casts and schedule.step_slots.slot_bytes > LARGE_SLOT_BYTES
            beside += casts and of_drive > 0
    assert large and beside
