"""Counts the bytes that autograd saves for backwards.

[Note: Parameters stay themselves]
A parameter that went through hooks for saved tensors comes back as another tensor without its attributes. Linear layers
that add weight gradients inside backward (Megatron's and Transformer Engine's, Megatron's default on a GPU) look for
``grad_added_to_main_grad`` on it. Without this attribute they return no gradient, and Megatron ends the run. While
tensors are counted, Functions written in Python therefore get the parameters themselves, as they do without hooks.
"""

from collections.abc import Callable, Iterable

import torch
from torch.autograd.function import BackwardCFunction


class _Kept:
    """A saved tensor; autograd drops it with the node that saved it."""

    __slots__ = ("tensor", "_owner", "_key")

    def __init__(self, tensor: torch.Tensor, owner: "SavedTensors", key: int):
        self.tensor, self._owner, self._key = tensor, owner, key

    def __del__(self) -> None:
        self._owner._release(self._key)


class SavedTensors:
    """Bytes of storages that autograd keeps for backwards, each storage once, while this is entered as a context.

    Tensors saved inside the context are counted until they are freed, even after the context was left. Hooks cost a few
    microseconds per saved tensor, so they are used in measuring programs and in one iteration of a run.

    Args:
        not_counted: tensors whose storages are not activations: parameters, masks. See [Note: Parameters stay
            themselves].
        on_saved: called after each saved tensor that adds bytes.

    Attributes:
        bytes: bytes saved now.
        peak: maximum of ``bytes`` since :meth:`restart`.
    """

    def __init__(self, not_counted: Iterable[torch.Tensor] = (), on_saved: Callable[[], None] | None = None):
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack)
        self._not_counted = {_place(tensor): tensor for tensor in not_counted}
        self._uncounted_storages = {storage for storage, *_ in self._not_counted}
        self._on_saved = on_saved
        self._held: dict[int, list[int]] = {}  # storage -> [times it is saved, bytes]
        self.bytes = self.peak = 0

    def __enter__(self) -> "SavedTensors":
        self._hooks.__enter__()
        BackwardCFunction.saved_tensors = property(self._saved_of)  # pyright: ignore[reportAttributeAccessIssue]
        return self

    def __exit__(self, *failure) -> None:
        self._hooks.__exit__(*failure)
        del BackwardCFunction.saved_tensors  # the attribute of torch's base class is visible again

    def restart(self) -> None:
        """Restart the peak at the bytes saved now."""
        self.peak = self.bytes

    def _saved_of(self, node) -> tuple[torch.Tensor | None, ...]:
        """The tensors that ``node`` saved; parameters are returned themselves."""
        saved = getattr(super(BackwardCFunction, node), "saved_tensors")  # noqa: B009 - torch's types lack it
        return tuple(
            self._not_counted.get(_place(t), t) if t is not None and t.is_leaf and t.requires_grad else t for t in saved
        )

    def _pack(self, tensor: torch.Tensor):
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._uncounted_storages:
            return tensor
        held = self._held.setdefault(key, [0, storage.nbytes()])
        held[0] += 1
        if held[0] == 1:
            self.bytes += held[1]
            self.peak = max(self.peak, self.bytes)
            if self._on_saved is not None:
                self._on_saved()
        # Detached, because a node that saves its own output would otherwise keep itself alive.
        return _Kept(tensor.detach(), self, key)

    def _release(self, key: int) -> None:
        held = self._held[key]
        held[0] -= 1
        if not held[0]:
            del self._held[key]
            self.bytes -= held[1]


def _unpack(saved) -> torch.Tensor:
    return saved.tensor if type(saved) is _Kept else saved


def _place(tensor: torch.Tensor) -> tuple:
    return tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.shape
