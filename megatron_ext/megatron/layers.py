"""Layers of a GPT chunk: which parameters they use and where one can act between them."""

import re
from typing import NamedTuple

import torch

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.")


class Layer(NamedTuple):
    """One layer of a chunk: its kind, the module whose forward begins it, its parameters by
    name in registration order, and names of parameters that it uses but another layer owns."""

    kind: str
    module: torch.nn.Module
    parameters: tuple[tuple[str, torch.nn.Parameter], ...]
    borrowed: tuple[str, ...] = ()


def bare(module: torch.nn.Module) -> torch.nn.Module:
    """The model inside of DDP and precision wrappers."""
    while hasattr(module, "module"):
        module = module.module
    return module


def layers_of(chunk: torch.nn.Module) -> list[Layer]:
    """Layers of a chunk in execution order: embedding, transformer layers, output.

    The final norm belongs to the output layer, whose first module it is. An output layer that is
    tied to an embedding in the same chunk borrows its weight. A chunk may have no layer with
    parameters; it then has no layers.
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
        borrowed = ()
        if part == 0:
            kind, module = "embedding", modules["embedding"]
        elif part == 1:
            kind, module = "transformer", modules[f"decoder.layers.{index}"]
        else:
            kind, module = "output", _first_output_module(modules)
            if "output_layer" in modules and getattr(model, "share_embeddings_and_output_weights", False):
                borrowed = tuple(name for name, _ in found.get((0, 0), ()) if name == "embedding.word_embeddings.weight")
        layers.append(Layer(kind, module, tuple(parameters), borrowed))
    return layers


def _first_output_module(modules) -> torch.nn.Module:
    for name in ("decoder.final_layernorm", "decoder.final_norm", "output_layer"):
        if modules.get(name) is not None:
            return modules[name]
    raise AssertionError("a chunk has parameters behind its layers but no final norm and no output layer")


class Boundaries:
    """Lets actions run between two layers, once, at no cost to other steps.

    [Note: Hooks that take themselves off]
    A forward pre-hook is put on the layer behind the boundary when the step begins and takes
    itself off when it runs: a permanent hook would cost 1.5 us a module in every step, and would
    have to tell a forward from the recompute inside a backward. The backward's actions hang on
    the activation that crosses the boundary: its gradient is complete when the layer behind has
    run backward and the layer before has not begun. (A full backward hook on the module would
    make outputs views, which ``deallocate_output_tensor`` refuses.)

    Args:
        chunks: this rank's model chunks, wrapped or bare.
        uses: by group, the first and the last layer of its chunk that use it.
        blocks: by chunk and layer, the first and the last layer that backward runs together.
    """

    def __init__(self, chunks: list[torch.nn.Module], uses: dict[int, tuple[int, int]], blocks: list[list[tuple[int, int]]]):
        self._layers = [layers_of(chunk) for chunk in chunks]
        self._uses, self._blocks = uses, blocks

    def uses(self, group_index: int) -> tuple[int, int]:
        return self._uses[group_index]

    def num_layers(self, model_chunk_id: int) -> int:
        return len(self._layers[model_chunk_id])

    def backward_begins(self, model_chunk_id: int, layer: int) -> int:
        return self._blocks[model_chunk_id][layer][1]

    def arm(self, model_chunk_id: int, boundary: int, forward, backward):
        """A function that makes ``forward`` run just before layer ``boundary`` computes next, and
        ``backward`` when the gradient of that layer's input is complete."""
        module, needs_activation = self._layers[model_chunk_id][boundary].module, bool(backward)

        def on_gradient(gradient) -> None:
            for action in backward:
                action()

        def arm() -> None:
            def before_layer(module, args, kwargs=None) -> None:
                handle.remove()
                if needs_activation:
                    activation = args[0] if args else kwargs["hidden_states"]
                    activation.register_hook(on_gradient)
                for action in forward:
                    action()

            # Torch calls a hook that takes no keywords more cheaply.
            handle = module.register_forward_pre_hook(before_layer, with_kwargs=needs_activation)

        return arm
