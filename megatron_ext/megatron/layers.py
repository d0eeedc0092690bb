"""Layers of a GPT chunk: which parameters they own and where one can wait before them."""

import re
from typing import NamedTuple

import torch

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.")


class Layer(NamedTuple):
    """One layer of a chunk: its kind, the module whose forward begins it, and its parameters
    by name in registration order."""

    kind: str
    module: torch.nn.Module
    parameters: tuple[tuple[str, torch.nn.Parameter], ...]


def bare(module: torch.nn.Module) -> torch.nn.Module:
    """The model inside of DDP and precision wrappers."""
    while hasattr(module, "module"):
        module = module.module
    return module


def layers_of(chunk: torch.nn.Module) -> list[Layer]:
    """Layers of a chunk in execution order: embedding, transformer layers, output.

    The final norm belongs to the output layer, whose first module it is. A chunk may have no
    layer with parameters; it then has no layers.
    """
    model = bare(chunk)
    modules = dict(model.named_modules())
    found: dict[tuple[int, int], list] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        match = _LAYER.match(name)
        if match:
            place = (1, int(match[1]))
        elif name.startswith("embedding."):
            place = (0, 0)
        else:  # final norm, output layer, and whatever comes behind them
            place = (2, 0)
        found.setdefault(place, []).append((name, parameter))
    for name in modules:  # a tied output layer owns no parameter, but runs
        if name == "output_layer" and (2, 0) not in found:
            found[(2, 0)] = []
    layers = []
    for (part, index), parameters in sorted(found.items()):
        if part == 0:
            kind, module = "embedding", modules["embedding"]
        elif part == 1:
            kind, module = "transformer", modules[f"decoder.layers.{index}"]
        else:
            kind, module = "output", _first_output_module(modules)
        layers.append(Layer(kind, module, tuple(parameters)))
    return layers


def _first_output_module(modules) -> torch.nn.Module:
    for name in ("decoder.final_layernorm", "decoder.final_norm", "output_layer"):
        if modules.get(name) is not None:
            return modules[name]
    raise AssertionError("a chunk has parameters behind its layers but no final norm and no output layer")


class LayerWaits:
    """Lets actions run just before a layer computes, once, at no cost to other steps.

    A forward pre-hook is put on the layer's module when the step begins and takes itself off
    when it runs: a permanent hook would cost 1.5 us a module in every step.
    """

    def __init__(self, chunks: list[torch.nn.Module], groups, first_layers: dict[int, int]):
        self._layers = [layers_of(chunk) for chunk in chunks]
        self._groups, self._first_layers = groups, first_layers

    def first_layer(self, group_index: int) -> int:
        """The first layer of the group's chunk that uses a parameter of the group."""
        return self._first_layers[group_index]

    def arm(self, model_chunk_id: int, layer: int, actions):
        """A function that makes ``actions`` run just before ``layer`` computes next."""
        module = self._layers[model_chunk_id][layer].module

        def arm() -> None:
            def before_layer(*unused) -> None:
                handle.remove()
                for action in actions:
                    action()

            handle = module.register_forward_pre_hook(before_layer)

        return arm
