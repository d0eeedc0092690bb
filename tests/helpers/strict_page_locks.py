"""Page-locking on the strict stand-in: each piece of host memory once, and unlocked when no copy or flag needs it."""

from types import SimpleNamespace

from strict_engine import where

REFUSED, ALREADY_LOCKED, NOT_LOCKED = 2, 712, 713
"""Error codes of CUDA's runtime."""


class PageLocks:
    """In place of the runtime's ``cudaHostRegister`` and ``cudaHostUnregister``; ``strict`` is the stand-in.

    Args:
        locks: how many pieces of host memory the driver locks; None: all.
    """

    def __init__(self, strict, locks: int | None):
        self.engine, self.memory, self._locks = strict.engine, strict.memory, locks
        self.engine.pinned_at = self._pinned_at
        self.runtime = SimpleNamespace(cudaHostRegister=self._register, cudaHostUnregister=self._unregister)

    def pinned(self, region) -> tuple:
        """That ``region`` is page-locked, as something that is accessed."""
        return "pinned", self.engine.rank, region.key

    def _pinned_at(self, address: int) -> tuple | None:
        region = self.memory.region(address)
        return self.pinned(region) if region is not None and region.locked else None

    def _register(self, address: int, size: int, flags: int) -> int:
        if self._locks is not None:
            self._locks -= 1
            if self._locks < 0:
                return REFUSED
        if not self.engine.closed:
            self.engine.might_synchronize("cudaHostRegister")
            if self._pinned_at(address) is not None:
                self.engine.error(f"memory is page-locked twice, at {where()}")
                return ALREADY_LOCKED
            self.memory.add_host(address, size, locked=True)
            if (region := self.memory.region(address)) is not None:
                region.registered = True
        return 0

    def _unregister(self, address: int) -> int:
        """Copies from or to this memory, and the end of its page-locking, are accesses to one thing."""
        region = self.memory.region(address)
        if self.engine.closed or region is None:  # it may have been locked in a run before
            return 0
        self.memory.check_time(self.memory.in_steps, "the end of page-locking")
        self.engine.might_synchronize("cudaHostUnregister")
        if not region.registered:
            self.engine.error(f"memory is unlocked that is not page-locked, at {where()}")
            return NOT_LOCKED
        self.engine.log(("access", f"cudaHostUnregister at {where()}", [(self.pinned(region), 0, 1, True)]))
        region.locked = region.registered = False
        return 0
