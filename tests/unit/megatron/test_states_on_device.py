"""What Megatron's host optimizer leaves undone for the optimizer that it has on the device."""

from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer

from megatron_ext.megatron import host_optimizers, states_on_device


@pytest.mark.parametrize("fused", [True, False])
def test_loaded_states_go_to_their_parameter(monkeypatch, fused):
    """Megatron brings them all to the host where both optimizers have one class. torch's AdamW wants its step count on
    the device only where it is fused."""
    monkeypatch.setattr(HybridDeviceOptimizer, "_move_new_state_to_right_device", lambda hybrid: None)
    parameter = torch.zeros(3, device="meta")
    state = {"exp_avg": torch.ones(3), "step": torch.tensor(5.0), "note": 1}
    gpu_optimizer = SimpleNamespace(state={parameter: state})
    states_on_device.move_states(SimpleNamespace(gpu_optimizer=gpu_optimizer, defaults={"fused": fused}))
    assert state["exp_avg"].device.type == "meta" and state["note"] == 1
    assert state["step"].device.type == ("meta" if fused else "cpu")


@pytest.mark.parametrize(("dtype", "waits"), [(torch.bfloat16, 1), (torch.float32, 0)])
def test_a_step_waits_for_gradients_that_are_cast_on_another_stream(monkeypatch, dtype, waits):
    parameter, copies = torch.nn.Parameter(torch.zeros(3, dtype=dtype)), object()
    parameter.decoupled_grad = torch.zeros(3, dtype=dtype)
    stream = mock.Mock()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    states_on_device.wait_for_casts(SimpleNamespace(on_device={parameter}, _d2h_stream=copies))
    assert stream.wait_stream.call_args_list == [mock.call(copies)] * waits


def test_chosen_storages_are_held_until_they_are_forgotten(monkeypatch):
    monkeypatch.setattr(host_optimizers, "chosen_storages", {})
    whole = torch.zeros(8)
    host_optimizers.choose("here", [whole])
    assert host_optimizers.is_chosen("here", whole[2:4]) and not host_optimizers.is_chosen("there", whole)
    assert not host_optimizers.is_chosen("here", torch.zeros(8))
    host_optimizers.forget_chosen()
    assert not host_optimizers.is_chosen("here", whole)
