"""Bytes of tensors that a rank holds, counted from outside by the same code for every system. Part of peers.py.

[Note: What is counted]
At the begin and the end of every layer, in forward and in backward, and at every collective, all tensors that Python
can reach are looked up in the garbage collector's lists, and their storages added up, each once. What autograd keeps
for the backward is held by C++ alone and tensors with a ``grad_fn`` are left out, so activations are not counted: the
rest is parameters, gradients, optimizer states and buffers. Storages that the system itself names as resting in host
memory count as host bytes: without a GPU both are one memory. The most of an iteration counts; the optimizer step
between its collectives does not.
"""

import bisect
import gc
import math
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

COLLECTIVES = (
    "all_gather_into_tensor",
    "_all_gather_base",
    "reduce_scatter_tensor",
    "_reduce_scatter_base",
    "all_reduce",
    "broadcast",
)


class Census:
    """Samples while it is ``counting``.

    Args:
        modules: the model; its transformer layers are where the rank is looked at.
        on_host: gives the tensors that the system keeps in host memory.
    """

    def __init__(self, modules: Iterable[nn.Module], on_host: Callable[[], Iterable[torch.Tensor]]):
        self.counting = False
        self.device_bytes = self.host_bytes = 0
        self._on_host, self._thread = on_host, threading.get_ident()
        self._old: list[weakref.ref] = []
        modules = list(modules)
        # FSDP2 gives a sharded layer a class of its own, derived from the layer's.
        self._layers = [
            layer
            for one in modules
            for layer in one.modules()
            if any(base.__name__ == "TransformerLayer" for base in type(layer).__mro__)
        ]
        assert self._layers or not modules, "a model without layers to look at"

    def _sampling(self, collective):
        def sampled(*args, **kwargs):
            self.sample()
            return collective(*args, **kwargs)

        return sampled

    def begin(self) -> None:
        """Count from here on. What is there is looked up once; afterwards only what is new."""
        for layer in self._layers:
            layer.register_forward_pre_hook(self._look)
            layer.register_forward_hook(self._look)
            layer.register_full_backward_pre_hook(self._look)
            layer.register_full_backward_hook(self._look)
        for name in COLLECTIVES:
            if hasattr(dist, name):
                setattr(dist, name, self._sampling(getattr(dist, name)))
        gc.collect()
        self._old = [weakref.ref(tensor) for tensor in _tensors(gc.get_objects())]
        gc.freeze()
        self.counting = True
        self.sample()

    def end(self) -> tuple[int, int]:
        """The most bytes on the device, and the bytes in host memory at that time."""
        self.counting = False
        gc.unfreeze()
        return self.device_bytes, self.host_bytes

    def _look(self, *_) -> None:
        self.sample()

    def sample(self) -> None:
        if not self.counting or threading.get_ident() != self._thread:
            return
        old = (tensor for tensor in (known() for known in self._old) if tensor is not None)
        held = _storages((*old, *_tensors(gc.get_objects())))
        host = _storages(self._on_host())
        host_bytes = sum(host.values())
        blocks = sorted((begin, begin + size) for begin, size in host.items())
        device_bytes = sum(size for begin, size in held.items() if not _inside(begin, blocks))
        if device_bytes > self.device_bytes:
            self.device_bytes, self.host_bytes = device_bytes, host_bytes


def _inside(address: int, blocks: list[tuple[int, int]]) -> bool:
    """Whether ``address`` lies in one of the ``blocks``, which are in order."""
    index = bisect.bisect_right(blocks, (address, math.inf)) - 1
    return index >= 0 and address < blocks[index][1]


def _tensors(objects: Iterable) -> Iterator[torch.Tensor]:
    return (thing for thing in objects if issubclass(type(thing), torch.Tensor))


def _local(tensor: DTensor) -> torch.Tensor | None:
    try:
        return tensor.to_local()
    except AttributeError:  # Megatron-FSDP's, of which this rank has nothing
        return None


def _storages(tensors: Iterable[torch.Tensor]) -> dict[int, int]:
    """Bytes by storage, without those of activations."""
    found: dict[int, int] = {}
    for tensor in tensors:
        for one in (tensor, tensor.grad if tensor.is_leaf else None):
            one = _local(one) if isinstance(one, DTensor) else one
            if one is not None and one.grad_fn is None and one.device.type == "cpu" and one.layout == torch.strided:
                storage = one.untyped_storage()
                found[storage.data_ptr()] = storage.nbytes()
    found.pop(0, None)
    return found
