"""Acting between two layers: once, and without a trace of it."""

import copy
import inspect
from functools import partial

import pytest
import torch

from megatron_ext.formats.errors import InputError
from megatron_ext.megatron.boundaries import Boundaries, Layer, layers_of


def two_layers():
    layers = [torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)]
    boundaries = Boundaries([], {}, [])
    boundaries.layers = [[Layer("transformer", layer, ()) for layer in layers]]
    return layers, boundaries


def run(layers, arm=None) -> None:
    if arm is not None:
        arm()
    layers[1](layers[0](torch.ones(2, 4))).sum().backward()


def test_actions_run_once_for_each_time_they_are_armed():
    layers, boundaries = two_layers()
    seen = []
    arm = boundaries.arm(0, 1, (lambda: seen.append("F"),), (lambda: seen.append("B"),))
    for armed in (True, False, True):
        run(layers, arm if armed else None)
    assert seen == ["F", "B", "F", "B"]


def test_hooks_of_others_stay_with_their_tensor():
    layers, boundaries = two_layers()
    seen, foreign = [], []
    arm = boundaries.arm(0, 1, (lambda: seen.append("F"),), (lambda: seen.append("B"),))
    inner = layers[1].forward

    def forward(hidden):
        output = inner(hidden)
        if not foreign:
            hidden.register_hook(lambda gradient: foreign.append("B"))
        return output

    layers[1].forward = forward
    run(layers, arm)
    run(layers, arm)
    assert seen == ["F", "B", "F", "B"] and foreign == ["B"]


def test_closing_gives_layers_their_forward_back():
    layers, boundaries = two_layers()
    wrapper = layers[1].forward = lambda hidden: hidden * 2  # somebody else's
    for number in (0, 1):
        boundaries.arm(0, number, (), ())
    assert "forward" in vars(layers[0]) and layers[1].forward is not wrapper
    boundaries.close()
    assert "forward" not in vars(layers[0]) and layers[1].forward is wrapper


def test_a_deep_copy_computes_with_its_own_parameters():
    layers, boundaries = two_layers()
    seen = []
    arm = boundaries.arm(0, 1, (lambda: seen.append("F"),), ())
    copied = copy.deepcopy(layers[1])
    with torch.no_grad():
        copied.weight.zero_()
        copied.bias.zero_()
    arm()
    assert not copied(torch.ones(2, 4)).any() and not seen  # nothing is armed in the copy
    assert layers[1](torch.ones(2, 4)).any() and seen == ["F"]


def test_a_layers_forward_keeps_its_signature():
    layers, boundaries = two_layers()
    before = inspect.signature(layers[1].forward)
    boundaries.arm(0, 1, (), ())
    assert inspect.signature(layers[1].forward) == before and "input" in before.parameters


def test_a_layer_that_is_wrapped_twice_runs_what_either_has_armed():
    layers, first = two_layers()
    second, seen = Boundaries([], {}, []), []
    second.layers = first.layers
    for number, boundaries in enumerate((first, second)):
        boundaries.arm(0, 1, (partial(seen.append, number),), ())()
    run(layers)
    assert seen == [1, 0]
    second.close()
    run(layers, first.arm(0, 1, (partial(seen.append, 2),), ()))
    assert seen == [1, 0, 2]


def test_what_runs_in_forward_alone_asks_for_no_activation():
    layers, boundaries = two_layers()
    seen = []
    boundaries.arm(0, 1, (lambda: seen.append("F"),), ())()
    layers[1](input=torch.ones(2, 4))  # not by the name that Megatron's layers have for it
    boundaries.arm(0, 1, (), ())()
    layers[1](torch.ones(2, 4))
    assert seen == ["F"]


def test_multi_token_prediction_reads_the_embedding_again_behind_the_decoder():
    """At zero stage 3 it must not be freed before: Megatron's GPTModel calls self.embedding from self.mtp."""
    model = torch.nn.Module()
    model.embedding = torch.nn.ModuleDict({"word_embeddings": torch.nn.Embedding(4, 2)})
    model.decoder = torch.nn.ModuleDict({"layers": torch.nn.ModuleList([torch.nn.Linear(2, 2)])})
    model.decoder["final_layernorm"] = torch.nn.LayerNorm(2)
    model.mtp = torch.nn.ModuleDict({"layers": torch.nn.ModuleList([torch.nn.Linear(2, 2)])})
    model.output_layer = torch.nn.Linear(2, 4)
    embedding, _, output = layers_of(model)
    assert output.borrowed == ("embedding.word_embeddings.weight",) == tuple(name for name, _ in embedding.parameters)
    assert "mtp.layers.0.weight" in dict(output.parameters)
    del model.mtp
    assert layers_of(model)[-1].borrowed == ()
    del model.decoder["final_layernorm"], model.output_layer
    model.mtp = torch.nn.Linear(2, 2)
    with pytest.raises(InputError, match="multi-token prediction must be on the last stage"):
        layers_of(model)
