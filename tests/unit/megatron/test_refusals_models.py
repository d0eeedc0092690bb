"""Models whose layers do not lie in one decoder say what they lack, in one line."""

import pytest
import torch

from megatron_ext.formats.errors import InputError
from megatron_ext.megatron.refusals import refuse_model


def stack() -> torch.nn.Module:
    stack = torch.nn.Module()
    stack.layers = torch.nn.ModuleList([torch.nn.Linear(2, 2)])
    return stack


def model(**parts) -> torch.nn.Module:
    """By the names that Megatron's models have."""
    model = torch.nn.Module()
    for name, part in parts.items():
        setattr(model, name, part)
    return model


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ({"encoder": stack, "decoder": stack}, "Module: has an encoder next to its decoder: .* two tensors"),  # T5
        ({"encoder": stack}, "its layers in encoder: .* layers of one decoder"),  # BERT
        ({"vision_model": stack, "language_model": stack}, "a vision model and a language model: "),  # LLaVA
    ],
)
def test_what_other_models_lack_is_said(parts, said):
    with pytest.raises(InputError, match=said):
        refuse_model(model(**{name: make() for name, make in parts.items()}))


def test_decoders_are_accepted():
    refuse_model(model(decoder=stack()))
    refuse_model(model(decoder=stack(), mtp=stack()))
    refuse_model(model(embedding=torch.nn.Embedding(2, 2)))  # a first stage without layers
