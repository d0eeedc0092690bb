"""A strict stand-in for a CUDA device, in place of torch.cuda while a rank trains on the CPU.

Streams are queues, and only the issuer may call the driver (strict_engine.py, driver_lock.py). Memory spaces are kept
apart (strict_memory.py): tensors that the host's memory holds (shared pools, staging slots, page-locked memory) may
meet the device's only in copies, asynchronous ones only where they are page-locked, and in kernels
(strict_kernels.py). An operation of torch on host memory alone is done at once, by the processor. A freed whole group
gives its block back to a pool by stream and size, which gives it to the next that asks. Every operation, copy,
collective, event, flag and hand-over between threads is logged for happens_before.py. Backwards, with the actions of
the program in them, are run by a thread of torch's.

What is here is torch's; what is this package's and Megatron's is in strict_runtime.py.

What tensors are dropped while other streams work on them is in strict_temporaries.py, what the processor reads without
an operation of torch in strict_host_reads.py.

Not seen: what happens inside one operation of torch; host memory that torch itself allocates (data loaders), which
counts as the device's; waits in a circle over several ranks, unless a run really stops there or ranks issue collectives
in different orders; what is written through a NumPy array; that messages between two ranks must be issued in matching
orders.
"""

import _thread
import contextlib
import sys
import threading
from concurrent.futures import Future, wait
from types import ModuleType
from unittest import mock

import torch
from strict_collectives import Collectives
from strict_copies import DearCopies
from strict_engine import Engine, where
from strict_host_reads import HostReads
from strict_kernels import Kernels
from strict_memory import Memory, Pool, tensors_in
from strict_page_locks import PageLocks
from strict_runtime import Runtime
from strict_streams import Event, StreamHandle, driver, on
from strict_temporaries import Temporaries
from symmetric_stand_in import SymmetricStandIn
from torch.utils._python_dispatch import TorchDispatchMode

SYNCHRONOUS = {"_local_scalar_dense", "nonzero", "masked_select", "equal", "_unique2", "unique_dim"}
"""Operations that wait for the device, because the host wants a value of it."""

MEGATRONS_OWN = "hybrid_optimizer.py:"  # which copies parameters back from pageable memory

SLEEP_CYCLES = 1.5e9
"""Of ``torch.cuda._sleep``, a second."""


class _Mode(TorchDispatchMode):
    def __init__(self, strict: "StrictDevice"):
        super().__init__()
        self.strict = strict

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return self.strict.operation(func, args, kwargs or {})


@contextlib.contextmanager
def _imported(modules: dict[str, ModuleType]):
    """They are imported. Not ``mock.patch.dict``: it also forgets other imports, and torch's compiler has but one."""
    before = {name: sys.modules.get(name) for name in modules}
    sys.modules.update(modules)
    yield
    for name, module in before.items():
        if module is None:
            del sys.modules[name]
        else:
            sys.modules[name] = module


class StrictDevice:
    """Context in which ``device_of`` gives CUDA devices that are this stand-in.

    Args:
        stream_flags: whether the device has them.
        locks: how many pieces of host memory the driver of the last rank page-locks; None: all.
        no_room: a file of the package for whose tensors the last rank's device has no memory.
        dear: arguments of :class:`DearCopies`.
        others: of :class:`Engine`.
    """

    def __init__(
        self,
        rank: int,
        seed: int,
        order: str,
        stream_flags: bool = True,
        locks: int | None = None,
        no_room: str = "",
        stuck_seconds: float = 60,
        dear: dict | None = None,
        **others,
    ):
        self.dear = DearCopies(**dear or {})
        self.rank, self.engine = rank, Engine(rank, seed, order, stuck_seconds, **others)
        self.memory = Memory(rank, self.engine.error, no_room if rank else "")
        self.temporaries = Temporaries(self.engine, self.memory.place)
        self.engine.name_of_flag = self.memory.name_of
        self.memory.given_back = self._given_back
        self._kinds: dict = {}
        self._stack, self._stream_flags = contextlib.ExitStack(), stream_flags
        self.symmetric, self.page_locks = SymmetricStandIn(), PageLocks(self, locks if rank else None)
        self.runtime = self.page_locks.runtime
        self.parts = Runtime(self)

    def findings(self) -> dict:
        """What this rank has to say, for the judgement over all."""
        engine = self.engine
        found = {kind: getattr(engine, kind) for kind in ("entries", "errors", "misplaced", "host_waits", "stacks")}
        found |= {"dear": self.dear.seen, "dear_looked_at": self.dear.looked_at}
        return found | {"stopped": engine.lock.circles, "gathers": self.symmetric.gathers}

    def _given_back(self, region) -> None:
        """torch's allocator waits for copies from and to its page-locked memory, but knows of no kernels."""
        place = (region.key, region.start, region.start + region.end - region.begin, True)
        self.engine.log(("access", f"page-locked memory is dropped at {where()}", [place]))

    # Operations of torch.

    def _kind(self, func):
        kind = self._kinds.get(func)
        if kind is None:
            schema = func._schema
            writes = [bool(a.alias_info and a.alias_info.is_write) for a in schema.arguments]
            names = [a.name for a in schema.arguments]
            views = any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)
            kind = self._kinds[func] = (views, writes, names, func._schema.name.split("::")[1])
        return kind

    def operation(self, func, args, kwargs):
        views, writes, names, name = self._kind(func)
        if self.engine.closed or views or func.namespace == "c10d":  # collectives are calls of process groups
            return func(*args, **kwargs)
        label = f"{name} at {where()}"
        found = []  # (tensor, place, writes)
        known = dict(zip(names, args)) | kwargs
        for argument, is_written in zip(names, writes):
            for tensor in tensors_in(known.get(argument)):
                place = self.memory.place(tensor, label)
                if place is not None:
                    found.append((tensor, place, is_written))
        regions = [self.memory.region(tensor.data_ptr()) for tensor, _, _ in found]
        accesses = [(*place, is_written) for _, place, is_written in found]
        issuer = threading.get_ident() == self.engine.main or not self.engine.one_issuer
        if all(region is not None for region in regions) and (found or not issuer):
            self.dear.on_host(label, [tensor for tensor, _, _ in found])
            return self._on_host(func, args, kwargs, label, accesses)
        return self._on_device(func, args, kwargs, name, label, found, regions, accesses)

    def _on_host(self, func, args, kwargs, label: str, accesses):
        self.engine.log(("access", f"{label}, by the processor", accesses))
        result = func(*args, **kwargs)
        for tensor in tensors_in(result):
            if tensor.numel() and self.memory.region(tensor.data_ptr()) is None:
                self.memory.to_host(tensor)
        return result

    def _on_device(self, func, args, kwargs, name: str, label: str, found, regions, accesses):
        engine, stream = self.engine, self.engine.current_work()
        on_host = any(region is not None for region in regions)
        blocking = name == "copy_" and not (args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
        if on_host and name != "copy_":
            args, accesses = self._with_values(args, label, found, regions)
            on_host, regions = False, [None] * len(regions)
        elif on_host:
            self.dear.between(label, found, regions, blocking)
            locked = (
                region is None or (region.locked and own[0].is_contiguous()) for own, region in zip(found, regions)
            )
            if not blocking and MEGATRONS_OWN not in label and not all(locked):
                engine.error(f"{label} copies asynchronously from or to pageable memory, maybe torch's own")
        if found:
            engine.call(label)
        pinned = [(self.page_locks.pinned(region), 0, 1, False) for region in regions if region and region.locked]
        engine.log_on(stream, ("access", label, accesses + pinned))
        if found:
            engine.launched(name, str(found[0][0].dtype))
        waits = name in SYNCHRONOUS or (blocking and on_host)
        if waits and stream is not engine.default and "copy" in name:
            engine.error(f"{label} blocks the thread on a stream")
        writes = any(is_written for _, _, is_written in found)
        if writes and (stream is not engine.default or (on_host and not blocking)):
            size = sum(tensor.nbytes for tensor, _, is_written in found if is_written)
            later = self.temporaries.lent(args)
            run = lambda: self.run_later(func, later, kwargs, label)
            stream.add(run, size=size, what=label, accesses=accesses)
            if waits:
                engine.synchronize([stream], name)
            return args[0] if func._schema.returns else None  # torch 2.6 insists, for fused optimizers
        if waits:
            engine.synchronize([stream], name)
        elif stream is engine.default:
            engine.drain(accesses) if found else None  # new memory is behind nothing
        elif found:
            engine.until(lambda: not stream.items)  # its result is wanted now: it is done behind the others at once
        result = func(*args, **kwargs)
        own = {tensor.untyped_storage().data_ptr() for tensor, _, _ in found}
        for tensor in tensors_in(result):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in own and tensor.numel():  # an empty part of other memory is nothing new
                self.memory.made(storage.data_ptr(), stream.name, name)
                self.temporaries.made(storage, self.memory.place(tensor, label)[0])
        return result

    def _with_values(self, args, label: str, found, regions):
        """A launch takes the value of a scalar in host memory with it: the arguments so, and the other accesses."""
        on_host = [one for one, region in zip(found, regions) if region is not None]
        if any(tensor.dim() or is_written for tensor, _, is_written in on_host):
            self.engine.error(f"{label} mixes host and device memory")
        self.engine.log(("access", f"{label}, by the processor", [(*place, False) for _, place, _ in on_host]))
        scalars = {id(tensor) for tensor, _, is_written in on_host if not is_written}
        args = [one.clone() if id(one) in scalars else one for one in args]
        others = [(*place, is_written) for (_, place, is_written), region in zip(found, regions) if region is None]
        return args, others

    def run_later(self, func, args, kwargs, label) -> None:
        for tensor in tensors_in(args):
            if tensor.numel() and tensor.untyped_storage().nbytes() == 0:
                self.engine.error(f"freed memory is used by {label}, when it ran")
                return
        with torch.no_grad():
            func(*args, **kwargs)

    # What stands in place of torch.

    def _patches(self):
        engine, cuda, default = self.engine, torch.cuda, StreamHandle(self.engine, self.engine.default)
        for name, value in {
            "Stream": lambda device=None, priority=0, **_: StreamHandle(engine),
            "Event": lambda *_, **how: Event(engine, **how),
            "current_stream": lambda device=None: getattr(engine.here, "stream", None) or default,
            "default_stream": lambda device=None: default,
            "stream": lambda stream: on(engine, stream),
            "device": lambda device: contextlib.nullcontext(),
            "synchronize": lambda device=None: engine.synchronize(None, "torch.cuda.synchronize"),
            "_sleep": self._sleep,
            "MemPool": Pool,
            "use_mem_pool": contextlib.contextmanager(lambda pool: (yield)),  # torch 2.15 reads its __wrapped__
            "empty_cache": lambda: None,
            "memory_reserved": lambda: 0,
            "cudart": lambda: self.runtime,
        }.items():
            yield mock.patch.object(cuda, name, value)
        stand_in, bindings = driver(engine, self._stream_flags), ModuleType("cuda.bindings")
        bindings.driver, package = stand_in, ModuleType("cuda")
        package.bindings = bindings
        yield _imported({"cuda": package, "cuda.bindings": bindings, "cuda.bindings.driver": stand_in})
        for owner, name, wrap in (
            (torch, "frombuffer", self._frombuffer),
            (torch, "get_rng_state", lambda original: lambda: self.memory.to_host(original())),
            *HostReads(self).patches(),
            (torch.UntypedStorage, "resize_", self._resize),
            *((kind, "_init_group", self._states) for kind in (torch.optim.Adam, torch.optim.AdamW)),
            (torch.autograd, "backward", self._backward),
            (threading.Thread, "start", self._start),
            (threading.Thread, "run", self._run_thread),
            (threading.Thread, "join", self._join_thread),
        ):
            yield mock.patch.object(owner, name, wrap(getattr(owner, name)))
        yield from self.symmetric.patches()
        for part in (Collectives(self), Kernels(self), self.parts, self.dear):
            yield from part.patches()

    def __enter__(self):
        for patch in self._patches():
            self._stack.enter_context(patch)
        self._stack.enter_context(_Mode(self))
        return self

    def __exit__(self, *_):
        self.engine.close()
        self._stack.close()
        if not torch.backends.cuda.is_built():  # page-locked memory may outlive the stand-in
            torch.cuda.cudart = lambda: self.runtime

    def _sleep(self, cycles: int) -> None:
        self.engine.call("torch.cuda._sleep")
        self.engine.current_work().add(lambda: None, seconds=cycles / SLEEP_CYCLES, what="sleeps")

    def _frombuffer(self, original):
        def run(buffer, *args, **kwargs):
            tensor = original(buffer, *args, **kwargs)
            if tensor.numel():
                self.memory.add_host(tensor.data_ptr(), tensor.nbytes, owner=buffer)
            return tensor

        return run

    def _resize(self, original):
        def resize(storage, size: int):
            if self.engine.closed or not self.memory.on_device(storage):
                return original(storage, size)
            engine, stream = self.engine, self.engine.current_work()
            engine.call("UntypedStorage.resize_")
            engine.drain()
            run = lambda size: original(storage, size)
            block, is_new = self.memory.resize(storage, size, stream.name, run)
            if is_new:  # the allocator may have to give blocks back, and keeps the interpreter's lock
                engine.might_synchronize("UntypedStorage.resize_ without a free block", keeps_interpreter=True)
            if size:
                self.temporaries.taken(stream.name)
                engine.log_on(stream, ("access", f"allocation at {where()}", [(block, 0, size, True)]))
            return None

        return resize

    def _states(self, original):
        """Adam's on the host lie there."""

        def run(own, group, *args, **kwargs):
            result = original(own, group, *args, **kwargs)
            for parameter in group["params"]:
                if self.memory.region(parameter.data_ptr()) is not None:
                    for state in own.state[parameter].values():
                        self.memory.to_host(state)
            return result

        return run

    # Threads.

    def _backward(self, original):
        """On a device a backward and its hooks are run by a thread of torch's, for which the issuer waits."""

        def backward(*args, **kwargs):
            engine, issuer, here, ended = self.engine, threading.get_ident(), self.engine.here.__dict__, Future()

            def aside():
                engine.main = threading.get_ident()
                engine.here.__dict__.update(here)
                try:
                    with _Mode(self):
                        result = original(*args, **kwargs)
                        self.parts.backward_ends()
                        ended.set_result(result)
                except BaseException as error:
                    ended.set_exception(error)

            _thread.start_new_thread(aside, ())
            wait([ended])
            engine.main = issuer
            return ended.result()

        return backward

    def _start(self, original):
        def start(thread):
            thread.begun = self.engine.token()
            self.engine.log(("out", thread.begun))
            original(thread)

        return start

    def _run_thread(self, original):
        def run(thread):
            begun = getattr(thread, "begun", None)
            if begun is None:
                return original(thread)
            self.engine.log(("in", begun))
            try:
                with _Mode(self):
                    original(thread)
            finally:
                token = self.engine.token()
                self.engine.log(("out", token))
                thread.done = token

        return run

    def _join_thread(self, original):
        def join(thread, timeout=None):
            original(thread, timeout)
            if not thread.is_alive() and hasattr(thread, "done"):
                self.engine.log(("in", thread.done))

        return join
