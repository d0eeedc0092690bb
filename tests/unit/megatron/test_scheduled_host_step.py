"""Which groups the host's optimizer may step beside the backward."""

import pytest
import torch

from megatron_ext.megatron.scheduled_host_step import added_up_later


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
