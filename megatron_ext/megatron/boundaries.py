"""Layers of a GPT chunk: which parameters they use, and the boundaries between them at which actions can run."""

import copy
import re
from collections import OrderedDict
from collections.abc import Callable
from functools import partial, update_wrapper
from typing import NamedTuple

import torch

from megatron_ext.formats.errors import InputError
from megatron_ext.workload.workload import EXPERTS

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.")


KINDS = {"MambaLayer": "mamba", "MLPLayer": "mlp"}
"""Kinds of a hybrid model's layers by the name of their class; all other layers are ``transformer``."""


class Layer(NamedTuple):
    """One layer of a chunk: its kind, the module whose forward runs first, its parameters by
    name in registration order, and the names of parameters that it uses but another layer owns."""

    kind: str
    module: torch.nn.Module
    parameters: tuple[tuple[str, torch.nn.Parameter], ...]
    borrowed: tuple[str, ...] = ()


def bare(module: torch.nn.Module) -> torch.nn.Module:
    """The model inside DDP and precision wrappers."""
    while isinstance(inner := getattr(module, "module", None), torch.nn.Module):
        module = inner
    return module


def layers_of(chunk: torch.nn.Module) -> list[Layer]:
    """Layers of a chunk in execution order: embedding, transformer layers, output.

    The final norm belongs to the output layer and is its first module. An output layer that is
    tied to an embedding in the same chunk borrows the embedding's weight. Layers of multi-token prediction run
    between the decoder and the output, and count as part of the output. They call the embedding again, so the
    output then borrows all parameters of the embedding. A chunk without parameters has no layers.
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
        else:  # final norm, output layer, and all modules after them
            place = (2, 0)
        found.setdefault(place, []).append((name, parameter))
    if "output_layer" in modules:  # a tied output layer owns no parameter but is run
        found.setdefault((2, 0), [])
    layers = []
    for (part, index), parameters in sorted(found.items()):
        borrowed = ()
        if part == 0:
            kind, module = "embedding", modules["embedding"]
        elif part == 1:
            module = modules[f"decoder.layers.{index}"]
            other = KINDS.get(type(module).__name__, "transformer")
            kind = "moe" if any(EXPERTS in name for name, _ in parameters) else other
        else:
            kind, module = "output", _first_output_module(modules)
            embedding = tuple(name for name, _ in found.get((0, 0), ()))
            if "mtp" in modules:
                borrowed = embedding
            elif "output_layer" in modules and getattr(model, "share_embeddings_and_output_weights", False):
                borrowed = tuple(name for name in embedding if name == "embedding.word_embeddings.weight")
        layers.append(Layer(kind, module, tuple(parameters), borrowed))
    return layers


def _first_output_module(modules) -> torch.nn.Module:
    for name in ("decoder.final_layernorm", "decoder.final_norm", "output_layer"):
        if modules.get(name) is not None:
            return modules[name]
    raise InputError(
        "a stage has parameters after its layers but no final norm and no output layer; layers of multi-token "
        "prediction must be on the last stage, with the output layer",
        field="--pipeline-model-parallel-layout",
    )


class Boundaries:
    """Runs actions between two layers, once, at no cost to other steps.

    [Note: Armed once]
    The forward of a layer after a boundary first looks into a list, and runs what a step has put there, once. A forward
    hook would cost 1.5 us per module in every step, and a hook that removes itself 3 us when it is armed. Neither can
    tell a forward from the recompute inside a backward. Actions of the backward are attached to the activation that
    crosses the boundary: its gradient is complete when the layer after the boundary has run backward and the layer
    before it has not begun. (A full backward hook on the module would turn outputs into views, which
    ``deallocate_output_tensor`` refuses.)

    Args:
        chunks: this rank's model chunks, wrapped or bare.
        uses: by group, the first and the last layer of its chunk that use the group.
        blocks: by chunk and layer, the first and the last layer of those that backward runs together.
    """

    def __init__(
        self, chunks: list[torch.nn.Module], uses: dict[int, tuple[int, int]], blocks: list[list[tuple[int, int]]]
    ):
        self.layers = [layers_of(chunk) for chunk in chunks]
        self._uses, self._blocks = uses, blocks
        self._waiting: dict[tuple[int, int], list] = {}
        self._restore: list[Callable[[], None]] = []

    def uses(self, group_index: int) -> tuple[int, int]:
        return self._uses[group_index]

    def num_layers(self, model_chunk_id: int) -> int:
        return len(self.layers[model_chunk_id])

    def block(self, model_chunk_id: int, layer: int) -> tuple[int, int]:
        return self._blocks[model_chunk_id][layer]

    def arm(self, model_chunk_id: int, boundary: int, forward, backward):
        """A function that makes ``forward`` run just before layer ``boundary`` computes next, and
        ``backward`` when the gradient of that layer's input is complete."""
        key = (model_chunk_id, boundary)
        if key not in self._waiting:
            self._waiting[key], restore = _wrap_forward(self.layers[model_chunk_id][boundary].module)
            self._restore.append(restore)
        return partial(self._waiting[key].append, _before_layer(forward, backward))

    def close(self) -> None:
        """Restore the forward of the layers."""
        while self._restore:
            self._restore.pop()()
        self._waiting.clear()


class _Armed:
    """Takes the place of a module's forward: runs the actions in ``armed`` once, and then the forward itself.

    It is an object, because a deep copy of the module (an average of the weights, for example) has to compute with its
    own parameters: ``copy.deepcopy`` copies objects and methods, and it does not copy functions.
    """

    def __init__(self, inner: Callable):
        update_wrapper(self, inner)  # first, as it also copies attributes, and ``inner`` may be another _Armed
        self.armed, self.inner = [], inner

    def __call__(self, *args, **kwargs):
        if self.armed:
            self.armed.pop()(args[0] if args else kwargs.get("hidden_states"))
        return self.inner(*args, **kwargs)

    def __deepcopy__(self, memo) -> "_Armed":
        return _Armed(copy.deepcopy(self.inner, memo))


def _wrap_forward(module: torch.nn.Module) -> tuple[list, Callable[[], None]]:
    """Make ``module`` run and remove the actions in a list before it computes. Returns the list, and a function that
    undoes this."""
    own, held = "forward" in vars(module), _Armed(module.forward)

    def restore() -> None:
        if vars(module).get("forward") is not held:
            return  # it was wrapped since then: the wrapper calls ours, in which nothing is armed any more
        if own:  # a wrapper that other code has put there
            module.forward = held.inner
        else:
            del module.forward

    module.forward = held
    return held.armed, restore


_NODES_TAKE_HOOKS = hasattr((torch.zeros(1, requires_grad=True) + 0).grad_fn, "_register_hook_dict")
"""Whether torch's private function is there; otherwise the public ``Tensor.register_hook`` is used."""


def _before_layer(forward, backward):
    """A function of an activation that runs ``forward`` at once, and ``backward``, if there is any, when the
    activation's gradient is complete."""

    def on_gradient(gradient: torch.Tensor) -> None:
        for action in backward:
            action()

    def before_layer(activation: torch.Tensor) -> None:
        # This is what Tensor.register_hook does, but without a handle. Other code can still add hooks: the dictionary
        # belongs to the tensor.
        if backward:
            node = activation.grad_fn
            if _NODES_TAKE_HOOKS and node is not None and activation._backward_hooks is None:
                activation._backward_hooks = hooks = OrderedDict()
                hooks["megatron_ext"] = on_gradient
                node._register_hook_dict(activation)  # pyright: ignore[reportAttributeAccessIssue] # see above
            else:
                activation.register_hook(on_gradient)
        for action in forward:
            action()

    return before_layer
