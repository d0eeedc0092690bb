"""Torch's norms under --sequence-parallel."""

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace

import pytest
import torch

from megatron_ext.megatron.megatron_on_cpu import norm_parts_of_sequences

PLACE = "megatron.core.transformer.torch_norm"


class WrappedTorchNorm:
    def __new__(cls, config, hidden_size):
        assert not config.sequence_parallel, "not supported by torch"
        return torch.nn.LayerNorm(hidden_size)


def test_a_norm_is_made_and_its_parameters_are_marked(monkeypatch):
    module = ModuleType(PLACE)
    module.__spec__ = ModuleSpec(PLACE, None)
    vars(module)["WrappedTorchNorm"] = norm = type("WrappedTorchNorm", (WrappedTorchNorm,), {})
    monkeypatch.setitem(sys.modules, PLACE, module)
    config = SimpleNamespace(sequence_parallel=True)
    with pytest.raises(AssertionError):
        norm(config, 4)
    norm_parts_of_sequences()
    made = norm(config, 4)
    assert isinstance(made, torch.nn.LayerNorm) and config.sequence_parallel
    assert all(vars(parameter)["sequence_parallel"] for parameter in made.parameters())
