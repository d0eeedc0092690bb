"""Torch's norms under --sequence-parallel, in the two forms that releases of Megatron have."""

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace

import pytest
import torch

from megatron_ext.megatron.megatron_on_cpu import norm_parts_of_sequences

PLACE = "megatron.core.transformer."


def refuse(config) -> None:
    assert not config.sequence_parallel, "not supported by torch"


class OfRelease09(torch.nn.LayerNorm):
    def __init__(self, config, hidden_size):
        refuse(config)
        super().__init__(hidden_size)


class OfLaterReleases:
    def __new__(cls, config, hidden_size):
        refuse(config)
        return torch.nn.LayerNorm(hidden_size)


@pytest.mark.parametrize(
    ("file", "name", "kind"),
    [("torch_layer_norm", "WrappedTorchLayerNorm", OfRelease09), ("torch_norm", "WrappedTorchNorm", OfLaterReleases)],
)
def test_a_norm_is_made_and_its_parameters_are_marked(monkeypatch, file, name, kind):
    monkeypatch.setitem(sys.modules, f"{PLACE}torch_norm", None)  # 0.9 has none
    module = ModuleType(PLACE + file)
    module.__spec__ = ModuleSpec(PLACE + file, None)
    norm = type(name, (kind,), {})
    setattr(module, name, norm)
    monkeypatch.setitem(sys.modules, PLACE + file, module)
    config = SimpleNamespace(sequence_parallel=True)
    with pytest.raises(AssertionError):
        norm(config, 4)
    norm_parts_of_sequences()
    made = norm(config, 4)
    assert isinstance(made, torch.nn.LayerNorm) and config.sequence_parallel
    assert all(vars(parameter)["sequence_parallel"] for parameter in made.parameters())
