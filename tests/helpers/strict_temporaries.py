"""Tensors that their owners drop, for the strict stand-in.

torch's allocator gives a block back to the stream that it was taken on as soon as its last owner drops it, whatever
other streams still do with it (``record_stream`` and unended collectives aside). The next allocation on that stream
may be this block. Here it is: as something that is written there. Sizes are not looked at.
"""

import weakref

import torch
from strict_engine import where
from torch.utils._python_dispatch import _disable_current_modes

_owners = getattr(torch._C, "_storage_Use_Count", lambda _: 1 << 30)  # else it is dropped when it ran


def _own_count() -> int:
    """What torch counts of a storage that one tensor has, but for this tensor."""
    storage = torch.empty(1).untyped_storage()
    tensor = torch.empty(0).set_(storage)
    return _owners(storage._cdata) - tensor.numel()


class Temporaries:
    """Of one rank; ``engine`` knows which memory has been used by other streams than its own."""

    def __init__(self, engine, place):
        self._engine, self._place, self._own_count = engine, place, _own_count()
        self._dropped: dict[str, list[tuple]] = {}  # by stream, memory that another has used
        self._queued: dict[int, tuple] = {}  # by storage: itself, where it lies, and what queued work has of it

    def made(self, storage: torch.UntypedStorage, key: tuple) -> None:
        """``storage`` is new. What was dropped on its stream may be its memory."""
        self.taken(key[3])
        weakref.finalize(storage, self._drop, key, storage.nbytes()).atexit = False

    def taken(self, stream: str) -> None:
        """Memory is taken on ``stream``."""
        for number, (storage, place, aliases) in list(self._queued.items()):
            if (own := storage()) is None:
                del self._queued[number]
            elif place[0][3] == stream:
                count = _owners(own._cdata) - self._own_count  # first: queued work ends meanwhile
                if count <= sum(alias() is not None for alias in aliases):
                    self._drop(place[0], own.nbytes())
        if stream in self._dropped:
            accesses = [(key, 0, size, True) for key, size in self._dropped.pop(stream)]
            self._engine.log_on(stream, ("access", f"allocation at {where()}, of memory that was dropped", accesses))

    def _drop(self, key: tuple, size: int) -> None:
        if key in self._engine.used_elsewhere:
            self._engine.used_elsewhere.discard(key)
            self._dropped.setdefault(key[3], []).append((key, size))

    def lent(self, value):
        """``value``, an argument of queued work, with tensors of its own: owners may drop theirs, and are seen to."""
        if isinstance(value, (list, tuple)):
            return [self.lent(one) for one in value]
        if not isinstance(value, torch.Tensor):
            return value
        with torch.no_grad(), torch._C.DisableTorchFunction(), _disable_current_modes():
            alias, storage = value.detach(), value.untyped_storage()
        place = self._place(value, "queued work")
        if place is not None and place[0][1] == "memory":
            queued = self._queued.setdefault(storage._cdata, (weakref.ref(storage), place, []))
            queued[2][:] = [one for one in queued[2] if one() is not None] + [weakref.ref(alias)]
        return alias
