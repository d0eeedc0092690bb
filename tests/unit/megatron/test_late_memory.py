"""What Megatron allocates before training begins, without the copies and gradients for which a schedule has no use."""

import pytest
import torch
from megatron.core.distributed import param_and_grad_buffer as upstream
from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer

from megatron_ext.megatron import late_memory


@pytest.fixture
def hybrid(monkeypatch):
    """A host optimizer of one parameter whose copy is left out and one whose is not, both (5, 3) in bfloat16."""
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    late, other = (torch.randn(5, 3).bfloat16() for _ in range(2))
    monkeypatch.setattr(late_memory, "storages_left_out", set())
    late_memory.leave_copies_out([late])
    return HybridDeviceOptimizer(
        [{"params": [late, other]}],
        offload_fraction=1.0,
        cpu_optimizer_cls=torch.optim.AdamW,
        gpu_optimizer_cls=torch.optim.AdamW,
        param_update_in_fp32=True,
        overlap_cpu_optimizer_d2h_h2d=False,
    ), late


def test_a_copy_that_is_left_out_takes_no_memory_and_is_handed_over(hybrid):
    optimizer, late = hybrid
    copy = optimizer.gpu_params_map_cpu_copy[late]
    assert copy.shape == late.shape and copy.dtype is torch.float32 and copy.isnan().all()
    assert copy.untyped_storage().nbytes() == 4
    assert list(late_memory.take_over(optimizer).items()) == [(copy, late)]


def test_what_needs_the_copy_before_gets_it(hybrid):
    optimizer, late = hybrid
    copy = optimizer.gpu_params_map_cpu_copy[late]
    optimizer.update_fp32_param_by_new_param()
    assert torch.equal(copy, late.float()) and not late_memory.take_over(optimizer)
    optimizer._init_sub_optimizers()  # as after loading a checkpoint
    assert torch.equal(optimizer.param_to_fp32_param[late], late.float())


@pytest.mark.parametrize("wanted", [False, True])
def test_whole_gradients_are_left_out_only_while_that_is_wanted(monkeypatch, wanted):
    made = {}

    def build(buffer, config, param_dtype, grad_dtype, numel):
        made[param_dtype] = torch.zeros(numel, dtype=param_dtype)
        made[grad_dtype] = torch.zeros(numel, dtype=grad_dtype)

    monkeypatch.setattr(upstream._ParamAndGradBuffer, "__init__", build)
    monkeypatch.delattr(upstream._ParamAndGradBuffer, "without_gradients", raising=False)
    late_memory.leave_gradients_out(lambda: wanted)
    upstream._ParamAndGradBuffer(None, torch.bfloat16, torch.float32, 1000)
    assert [made[dtype].shape for dtype in made] == [(1000,), (1000,)]
    assert made[torch.bfloat16].untyped_storage().nbytes() == 2000
    assert made[torch.float32].untyped_storage().nbytes() == (4 if wanted else 4000)
    monkeypatch.delattr(upstream._ParamAndGradBuffer, "without_gradients", raising=False)
