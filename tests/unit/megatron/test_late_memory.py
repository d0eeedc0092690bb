"""What Megatron allocates before training begins, without the copies and gradients for which a schedule has no use."""

import contextlib
import errno
import gc
import weakref
from unittest.mock import MagicMock

import pytest
import torch
from megatron.core.distributed import param_and_grad_buffer as upstream
from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer

from megatron_ext.formats.errors import InputError
from megatron_ext.megatron import host_optimizers, late_memory
from megatron_ext.megatron.lifecycle import Run


@pytest.fixture
def hybrid(monkeypatch, tmp_path):
    """A host optimizer of one parameter whose copy is left out and one whose is not, both (5, 3) in bfloat16."""
    monkeypatch.setattr(torch.cuda, "current_stream", MagicMock())
    monkeypatch.setattr(torch.cuda, "stream", contextlib.nullcontext)
    late, other = (torch.randn(5, 3).bfloat16() for _ in range(2))
    monkeypatch.setattr(host_optimizers, "chosen_storages", {})
    monkeypatch.delattr(HybridDeviceOptimizer, "left_out", raising=False)
    late_memory.leave_copies_out([late], tmp_path)
    return build([late, other]), late


def build(parameters: list[torch.Tensor]) -> HybridDeviceOptimizer:
    return HybridDeviceOptimizer(
        [{"params": parameters, "lr": 0.1}],
        offload_fraction=1.0,
        cpu_optimizer_cls=torch.optim.AdamW,
        gpu_optimizer_cls=torch.optim.AdamW,
        param_update_in_fp32=True,
        overlap_cpu_optimizer_d2h_h2d=False,
        pin_cpu_grads=False,
    )


def test_a_copy_that_is_left_out_takes_no_memory_and_is_handed_over(hybrid):
    optimizer, late = hybrid
    copy = optimizer.gpu_params_map_cpu_copy[late]
    assert copy.shape == late.shape and copy.dtype is torch.float32 and copy.isnan().all()
    assert copy.untyped_storage().nbytes() == 4
    assert list(late_memory.take_over(optimizer, {copy}).items()) == [(copy, late)]


def test_the_host_optimizer_that_megatron_replaces_is_gone_before_anybody_looks_for_memory(monkeypatch):
    """DistributedOptimizer builds it a second time; the first one, with an fp32 copy of all parameters, is a circle."""
    monkeypatch.setattr(torch.cuda, "current_stream", MagicMock())
    gc.disable()
    try:
        seen = weakref.ref(build([torch.randn(3).bfloat16()]))
        assert seen() is not None
        late_memory.flush([])
        assert seen() is None
    finally:
        gc.enable()


def in_file(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` lies in a file without a name."""
    with open("/proc/self/maps") as maps:
        for line in maps:
            start, end = (int(address, 16) for address in line.split(" ", 1)[0].split("-"))
            if start <= tensor.data_ptr() < end:
                return "(deleted)" in line
    return False


def test_what_needs_the_copy_before_gets_it_on_the_drive(hybrid):
    optimizer, late = hybrid
    copy = optimizer.gpu_params_map_cpu_copy[late]
    optimizer.update_fp32_param_by_new_param()
    assert torch.equal(copy, late.float()) and in_file(copy)
    optimizer._init_sub_optimizers()  # as after loading a checkpoint
    assert optimizer.param_to_fp32_param[late] is copy
    assert not late_memory.take_over(optimizer, set())


def test_states_that_a_checkpoint_is_to_fill_are_made_on_the_drive(hybrid):
    """As the optimizer would make them itself: same names, shapes and dtypes; its steps are those of one in memory."""
    late = hybrid[1]
    optimizer, plain = build([late]), torch.optim.AdamW([late.float()], lr=0.1)
    (copy,) = plain.param_groups[0]["params"]
    copy.grad = torch.randn(5, 3)
    plain.step()
    optimizer.dummy_step()
    own, theirs = optimizer.state[late], plain.state[copy] | {"master_param": copy}
    assert {name: (value.shape, value.dtype) for name, value in own.items()} == {
        name: (value.shape, value.dtype) for name, value in theirs.items()
    }
    assert all(in_file(value) == bool(value.dim()) for value in own.values())
    for name, value in theirs.items():
        own[name].copy_(value)
    optimizer.load_state_dict(optimizer.state_dict())  # makes the optimizers anew
    late.decoupled_grad = copy.grad = torch.randn(5, 3)
    optimizer.step()
    plain.step()
    assert torch.equal(optimizer.state[late]["master_param"], copy) and torch.equal(late, copy.bfloat16())
    assert in_file(optimizer.state[late]["exp_avg"])


def test_states_are_made_without_a_step_of_megatrons(hybrid, monkeypatch):
    """It would keep gradients of all parameters, and write parameters that may have no memory."""
    optimizer, late = hybrid
    before, stepped = [p.clone() for group in optimizer.param_groups for p in group["params"]], []
    monkeypatch.setattr(HybridDeviceOptimizer, "step", lambda *_: stepped.append(1))
    optimizer.dummy_step()
    assert all(copy.grad is None for copy in optimizer.gpu_params_map_cpu_copy.values())
    after = [p for group in optimizer.param_groups for p in group["params"]]
    assert not stepped and not optimizer.cpu_copy_map_grad and all(map(torch.equal, before, after))


def test_random_numbers_behind_them_are_those_of_megatron(hybrid, monkeypatch):
    def drawn(make) -> torch.Tensor:
        torch.manual_seed(1)
        make()
        return torch.rand(3)

    monkeypatch.setattr(HybridDeviceOptimizer, "step", lambda _: None)
    optimizer, _ = hybrid
    assert torch.equal(drawn(optimizer.dummy_step), drawn(lambda: HybridDeviceOptimizer.dummy_step(optimizer)))


def test_memory_that_cannot_be_locked_while_a_checkpoints_states_are_made_is_told_behind_it(monkeypatch):
    """Where the ranks load they meet."""
    made = {"not_locked": None, "_init_sub_optimizers": HybridDeviceOptimizer._init_sub_optimizers}
    for name, value in {**made, "dummy_step": lambda _: torch.empty(15, pin_memory=True)}.items():
        monkeypatch.setattr(HybridDeviceOptimizer, name, value, raising=False)
    monkeypatch.setattr(torch.Tensor, "pin_memory", MagicMock(side_effect=RuntimeError("CUDA error: out of memory")))
    del HybridDeviceOptimizer.not_locked
    late_memory.tell_what_is_not_locked()
    optimizer = HybridDeviceOptimizer.__new__(HybridDeviceOptimizer)
    optimizer.dummy_step()
    assert "60 bytes of host memory cannot be page-locked" in optimizer.not_locked


def test_another_model_in_the_same_process_has_all_its_copies(hybrid):
    """Its parameters may have the addresses of those that were left out before."""
    late = hybrid[1]
    with pytest.raises(AssertionError, match="a copy is missing"):
        late_memory.take_over(hybrid[0], set())
    Run(None, None)
    assert torch.equal(build([late]).param_to_fp32_param[late], late.float())


def test_a_drive_that_is_full_is_named_when_states_are_made(hybrid, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    with pytest.raises(InputError, match=r"--user-defined-schedule-nvme-path = .*: the drive is full: \d+ bytes"):
        hybrid[0].dummy_step()


@pytest.mark.parametrize("wanted", [False, True])
def test_whole_gradients_are_left_out_only_while_that_is_wanted(monkeypatch, wanted):
    made = {}

    def build(buffer, config, param_dtype, grad_dtype, numel):
        made[param_dtype] = torch.zeros(numel, dtype=param_dtype)
        made[grad_dtype] = torch.zeros(numel, dtype=grad_dtype)

    monkeypatch.setattr(upstream._ParamAndGradBuffer, "__init__", build)
    monkeypatch.delattr(upstream._ParamAndGradBuffer, "without_gradients", raising=False)
    late_memory.leave_buffers_out(lambda: wanted, lambda: False)
    upstream._ParamAndGradBuffer(None, torch.bfloat16, torch.float32, 1000)
    assert [made[dtype].shape for dtype in made] == [(1000,), (1000,)]
    assert made[torch.bfloat16].untyped_storage().nbytes() == 2000
    assert made[torch.float32].untyped_storage().nbytes() == (4 if wanted else 4000)
    monkeypatch.delattr(upstream._ParamAndGradBuffer, "without_gradients", raising=False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("gradients", [True, False])
def test_whole_parameters_are_left_out_where_they_never_fit(monkeypatch, dtype, gradients):
    def build(buffer, config, param_dtype, grad_dtype, numel):
        buffer.param_data = torch.zeros(numel, dtype=param_dtype)
        buffer.grad_data = torch.zeros(numel, dtype=grad_dtype)

    monkeypatch.setattr(upstream._ParamAndGradBuffer, "__init__", build)
    monkeypatch.delattr(upstream._ParamAndGradBuffer, "without_gradients", raising=False)
    late_memory.leave_buffers_out(lambda: gradients, lambda: True)
    buffer = upstream._ParamAndGradBuffer(None, dtype, torch.float32, 1000)
    assert buffer.param_data is None and buffer.grad_data.shape == (1000,)
    assert buffer.grad_data.untyped_storage().nbytes() == (4 if gradients else 4000)
    monkeypatch.delattr(upstream._ParamAndGradBuffer, "without_gradients", raising=False)
