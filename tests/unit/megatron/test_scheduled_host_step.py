"""Which groups the host's optimizer may step during the backward, and what a checkpoint has of states on the drive."""

from types import SimpleNamespace

import pytest
import torch

from megatron_ext.megatron.host_optimizers import own_optimizers
from megatron_ext.megatron.scheduled_host_step import added_up_later, save_from_drive
from megatron_ext.runtime.host_step.room import Piece
from megatron_ext.runtime.host_step.unit import HostUnit


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


def test_a_loaded_optimizer_that_is_not_adamw_has_states_that_can_be_taken_back():
    """Megatron's torch_dist checkpoints leave a bool among them, of which no copy can be made."""
    parameter, momentum = torch.zeros(2), torch.ones(2)
    before = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
    before.state[parameter] = {"momentum_buffer": momentum, "padding": False, "master_param": parameter}
    hybrid = SimpleNamespace(cpu_optimizer_cls=torch.optim.SGD, cpu_optimizers=[before])
    (own,) = own_optimizers(hybrid, [[{**before.param_groups[0], "params": [parameter]}]])
    assert hybrid.cpu_optimizers == [own]
    unit = HostUnit(0, own, [Piece(parameter, lambda: None, torch.zeros(2, dtype=torch.bfloat16), False, False)], None)
    assert unit.rollback_bytes() == 2 * 64
