"""A strict stand-in for a CUDA device, in place of torch.cuda while a rank trains on the CPU.

Streams are queues (strict_streams.py). Memory spaces are kept apart: tensors that the host's memory holds (shared
pools, staging slots, page-locked memory) may meet the device's only in copies, asynchronous ones only where they are
page-locked. A freed whole group gives its block back to a pool by stream and size, which gives it to the next that
asks. Every operation, copy, collective, event, flag and hand-over between threads is logged for happens_before.py.

Not seen: what happens inside one operation of torch; host memory that torch itself allocates (data loaders), which
counts as the device's.
"""

import bisect
import contextlib
import ctypes
import sys
import threading
import time
from functools import partial
from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer
from strict_streams import Engine, Event, Stream
from symmetric_stand_in import SymmetricStandIn
from torch._C._distributed_c10d import ProcessGroup
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from megatron_ext.megatron import shards
from megatron_ext.runtime import device as devices
from megatron_ext.runtime import (
    drive,
    early_steps,
    executor,
    gradients,
    group,
    host_pool,
    node_exchange,
    page_locked,
    shared_flags,
    worker,
)
from megatron_ext.runtime.stream_flags import StreamFlags

COLLECTIVES = (
    "_allgather_base _reduce_scatter_base allreduce broadcast allgather allgather_into_tensor_coalesced "
    "all_gather_single all_gather_single_coalesced reduce_scatter_single reduce_scatter_single_coalesced "
    "reduce_scatter_tensor_coalesced allreduce_coalesced barrier reduce gather scatter"
).split()
POISON = 0x7F


def _tensors(value):
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from _tensors(one)


class _Mode(TorchDispatchMode):
    def __init__(self, strict: "StrictDevice"):
        super().__init__()
        self.strict = strict

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return self.strict.operation(func, args, kwargs or {})


class StrictDevice:
    """Context in which ``device_of`` gives CUDA devices that are this stand-in.

    Args:
        seed, order: see Engine.
        stream_flags: whether streams store flags and wait for them; else threads do.
        stuck_seconds: after so long a wait for the device is an error.
    """

    def __init__(self, rank: int, seed: int, order: str, stream_flags: bool = True, stuck_seconds: float = 20):
        self.rank, self.engine = rank, Engine(rank, seed, order, stuck_seconds)
        self._regions: list[list] = []  # host memory, by address: [begin, end, key, page-locked]
        self._blocks: dict[int, int] = {}  # block of a storage that comes and goes
        self._free: dict[tuple, list[int]] = {}
        self._made_on: dict[int, str] = {}  # stream on which a storage was allocated
        self._sequence: dict[int, int] = {}
        self._handed: dict[int, tuple] = {}
        self._kept: list = []
        self._moved: set[int] = set()  # what is taken on the device of a shard in host memory
        self._kinds: dict = {}
        self._blocks_made = 0
        self._stack, self._stream_flags = contextlib.ExitStack(), stream_flags
        self.symmetric = SymmetricStandIn()
        self.runtime = SimpleNamespace(cudaHostRegister=self._register, cudaHostUnregister=self._unregister)

    # Memory.

    def _region(self, address: int) -> list | None:
        number = bisect.bisect_right(self._regions, address, key=lambda region: region[0]) - 1
        found = self._regions[number] if number >= 0 else None
        return found if found is not None and address < found[1] else None

    def _host(self, begin: int, size: int, key=None, locked: bool = False) -> None:
        region = self._region(begin)
        if region is not None:
            region[2], region[3] = key or region[2], region[3] or locked
        else:
            bisect.insort(self._regions, [begin, begin + size, key or (self.rank, begin), locked], key=lambda r: r[0])

    def _to_host(self, tensor: torch.Tensor, locked: bool = False) -> torch.Tensor:
        """``tensor``, whose storage lies in host memory from now on."""
        storage = tensor.untyped_storage()
        if storage.nbytes():
            self._kept.append(storage)
            self._host(storage.data_ptr(), storage.nbytes(), locked=locked)
        return tensor

    def _place(self, tensor: torch.Tensor) -> tuple | None:
        """``(key, begin, end)`` of the bytes of ``tensor``; None where it has none."""
        if tensor.numel() == 0:
            return None
        size = tensor.element_size()
        span = (1 + sum((n - 1) * abs(stride) for n, stride in zip(tensor.shape, tensor.stride()))) * size
        storage = tensor.untyped_storage()
        block = self._blocks.get(storage._cdata)
        if block is not None:
            if storage.nbytes() == 0:
                self._error(f"freed memory is used by {self._where()}")
                return None
            begin = tensor.storage_offset() * size
            return (self.rank, "block", block), begin, begin + span
        begin = tensor.data_ptr()
        region = self._region(begin)
        if region is not None:
            return region[2], begin - region[0], begin - region[0] + span
        base = storage.data_ptr()
        return (self.rank, "memory", base, self._made_on.get(base)), begin - base, begin - base + span

    def _error(self, text: str) -> None:
        if text not in self.engine.errors:
            self.engine.errors.append(text)

    def _where(self) -> str:
        frame = sys._getframe(2)
        while frame is not None:
            name = frame.f_code.co_filename
            if ("/megatron_ext/" in name or "/megatron/" in name) and not name.endswith("cpu_compat.py"):
                return f"{name.rpartition('/')[2]}:{frame.f_lineno}"
            frame = frame.f_back
        return "?"

    def _resized(self, storage, resize):
        """``resize`` of a whole group or gradient, with a block for as long as it has bytes."""

        def run(size: int):
            stream = self.engine.current().name
            if size:
                resize(size)
                free = self._free.setdefault((stream, size), [])
                block = free.pop() if free else self._blocks_made
                self._blocks_made += block == self._blocks_made
                self._blocks[storage._cdata] = block
                ctypes.memset(storage.data_ptr(), POISON, size)
                self.engine.log_on(stream, ("access", "allocation", [((self.rank, "block", block), 0, size, True)]))
            else:
                freed = storage.nbytes()
                resize(0)  # torch refuses where there is a NumPy array of it
                self._free.setdefault((stream, freed), []).append(self._blocks[storage._cdata])

        return run

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
        if views or func.namespace == "c10d":  # collectives are seen as calls of process groups
            return func(*args, **kwargs)
        found = []  # (tensor, place, writes)
        known = dict(zip(names, args)) | kwargs
        for argument, is_written in zip(names, writes):
            for tensor in _tensors(known.get(argument)):
                place = self._place(tensor)
                if place is not None:
                    found.append((tensor, place, is_written))
        regions = [self._region(tensor.data_ptr()) for tensor, _, _ in found]
        on_host = [region is not None for region in regions]
        blocking = name == "copy_" and not (known.get("non_blocking") or False)
        label = f"{name} at {self._where()}"
        if any(on_host) and not all(on_host):
            if name != "copy_":
                self._error(f"{label} mixes host and device memory")
            elif not blocking and not all(region is None or region[3] for region in regions):
                self._error(f"{label} copies asynchronously from or to pageable memory")
        accesses = [(*place, is_written) for _, place, is_written in found]
        engine, stream = self.engine, self.engine.current()
        if found and all(on_host):
            engine.log(("access", label, accesses))
            result = func(*args, **kwargs)
            for tensor in _tensors(result):
                if self._region(tensor.data_ptr()) is None:
                    self._to_host(tensor)
            return result
        pinned = [((self.rank, "pinned", region[0]), 0, 1, False) for region in regions if region and region[3]]
        engine.log_on(stream, ("access", label, accesses + pinned))
        if stream is not engine.default and found:
            if blocking and any(on_host):
                self._error(f"{label} blocks the thread on a stream")
            if any(is_written for _, _, is_written in found):
                stream.add(lambda: self._run_later(func, args, kwargs, label))
                return args[0]
            engine.until(lambda: not stream.items)  # its result is wanted now: it is done behind the others at once
        elif found:
            engine.behind_all()
        result = func(*args, **kwargs)
        own = {tensor.untyped_storage().data_ptr() for tensor, _, _ in found}
        for tensor in _tensors(result):
            base = tensor.untyped_storage().data_ptr()
            if base not in own:
                self._made_on[base] = stream.name
        if name == "_local_scalar_dense" or (blocking and any(on_host)):
            self._join(stream)
            if "/megatron_ext/" in sys._getframe(3).f_code.co_filename:
                engine.host_wait(label)
        return result

    def _run_later(self, func, args, kwargs, label):
        for tensor in _tensors(args):
            if tensor.numel() and tensor.untyped_storage().nbytes() == 0:
                self._error(f"freed memory is used by {label}, when it ran")
                return
        with torch.no_grad():
            func(*args, **kwargs)

    def _join(self, stream) -> None:
        token = self.engine.token()
        self.engine.log_on(stream, ("out", token))
        self.engine.log(("in", token))

    # Collectives.

    def _collective(self, name: str, original):
        def issue(process_group, *args, **kwargs):
            if getattr(self.engine.here, "quiet", False):
                return original(process_group, *args, **kwargs)
            engine, stream, number = self.engine, self.engine.current(), self._sequence.get(id(process_group), 0)
            self._sequence[id(process_group)] = number + 1
            ranks = tuple(dist.get_process_group_ranks(process_group))
            accesses = self._accesses_of_collective(name, args)
            label, inside = f"{name} at {self._where()}", f"communicator {id(process_group)}"
            before, after = engine.token(), engine.token()
            engine.log_on(stream, ("out", before))
            together = ("collective", (ranks, process_group.group_name, number), self.rank, len(ranks))
            engine.log_on(
                inside,
                ("in", before),
                ("access", label, accesses),
                together,
                ("access", label, accesses),
                ("out", after),
            )
            if stream is engine.default:
                engine.behind_all()
                return _Work(self, original(process_group, *args, **kwargs), after)
            work = _Work(self, None, after)

            def begin():
                work.inner = original(process_group, *args, **kwargs)
                return work._wait_aside()

            stream.add(begin)
            return work

        return issue

    def _accesses_of_collective(self, name: str, args) -> list[tuple]:
        """What is given first is written, what is given second is read; a part that is gathered in place only read."""
        written, read = ([(t, self._place(t)) for t in _tensors(one)] for one in (*args, (), ())[:2])
        if any(place is not None and self._region(t.data_ptr()) is not None for t, place in (*written, *read)):
            self._error(f"{name} at {self._where()} is given host memory")
        own = {place for _, place in read if place is not None}
        accesses = [(*place, False) for place in own]
        for key, begin, end in (place for _, place in written if place is not None):
            for place, first, last in own:
                if place == key and begin <= first and last <= end and "gather" in name:
                    accesses.append((key, begin, first, True))
                    begin = last
            accesses.append((key, begin, end, True))
        return accesses

    # Hand-overs between threads.

    def _hand_over(self, thing) -> None:
        token = self._handed[id(thing)] = self.engine.token()
        self._kept.append(thing)
        self.engine.log(("out", token))

    def _take(self, thing) -> None:
        token = self._handed.get(id(thing))
        if token is not None:
            self.engine.log(("in", token))

    def _submit(self, original):
        def submit(own, function):
            token = self.engine.token()
            self.engine.log(("out", token))

            def run(transfer):
                self.engine.log(("in", token))
                with _Mode(self):
                    return function(transfer)

            return original(own, run)

        return submit

    def _patches(self):
        engine = self.engine
        for name, value in {
            "Stream": lambda device=None, priority=0: Stream(engine),
            "Event": lambda **kwargs: Event(engine, **kwargs),
            "current_stream": lambda device=None: engine.current(),
            "default_stream": lambda device=None: engine.default,
            "stream": engine.on,
            "device": lambda device: contextlib.nullcontext(),
            "synchronize": lambda device=None: engine.synchronize(),
            "_sleep": lambda cycles: None,
            "cudart": lambda: self.runtime,
        }.items():
            yield mock.patch.object(torch.cuda, name, value)
        yield mock.patch.object(devices, "HostDevice", lambda: devices.CudaDevice(torch.device("cuda", 0)))
        yield from self.symmetric.patches()
        flags = (StreamFlags(engine.driver()), "") if self._stream_flags else (None, "asked for")
        yield mock.patch.object(devices, "open_stream_flags", lambda device: flags)
        for name in filter(partial(hasattr, ProcessGroup), COLLECTIVES):  # releases of torch differ
            yield mock.patch.object(ProcessGroup, name, self._collective(name, getattr(ProcessGroup, name)))
        for owner, name, wrap in (
            (dist, "all_gather_object", self._objects),
            (dist, "broadcast_object_list", self._objects),
            (torch, "frombuffer", self._frombuffer),
            (torch.Tensor, "numpy", self._numpy),
            (torch.Tensor, "cpu", self._cpu),
            (torch.optim.Adam, "_init_group", self._states),
            (HybridDeviceOptimizer, "_init_sub_optimizers", self._host_optimizer),
            (early_steps.EarlySteps, "__init__", self._early_steps),
            (node_exchange.NodeExchange, "buffer", self._exchange_buffer),
            (node_exchange.NodeExchange, "begin", self._exchange),
            (node_exchange.Arriving, "wait", self._arrived),
            (worker.Worker, "submit", self._submit),
            (worker.Transfer, "finish", self._finish),
            (worker.Transfer, "wait", self._wait),
            (worker.Transfer, "finished", self._wait),
            (shared_flags.OrderedFlags, "store", self._store),
            (host_pool.HostPool, "__init__", self._pool),
            (host_pool.HostPool, "poll", self._poll),
            (group.FreedGroup, "__init__", self._comes_and_goes),
            (gradients.Gradient, "__init__", self._comes_and_goes),
            (drive.DriveFile, "write", self._drive_write),
            (drive.DriveFile, "start", self._drive_start),
            (executor.Executor, "begin_iteration", self._step(True)),
            (executor.Executor, "params_updated", self._step(False)),
            (executor.Executor, "unshard_all", self._step(False)),
            (shards.ShardOf, "__init__", self._shard_of),
            (shards.ShardOf, "__getitem__", self._to_device),
        ):
            yield mock.patch.object(owner, name, wrap(getattr(owner, name)))

    def __enter__(self):
        for patch in self._patches():
            self._stack.enter_context(patch)
        self._stack.enter_context(_Mode(self))
        return self

    def __exit__(self, *_):
        for memory in self._kept:
            if isinstance(memory, page_locked.Memory):
                memory.unlock = None  # there is no driver any more
        self._stack.close()
        self.engine.close()

    # What stands in place of each function above.

    def _objects(self, original):
        def run(*args, **kwargs):
            self.engine.here.quiet = True
            process_group = kwargs.get("group") or dist.distributed_c10d._get_default_group()
            number = self._sequence.get(id(process_group), 0)
            self._sequence[id(process_group)] = number + 1
            ranks = tuple(dist.get_process_group_ranks(process_group))
            try:
                with _disable_current_modes():
                    result = original(*args, **kwargs)
            finally:
                self.engine.here.quiet = False
            self.engine.log(("collective", (ranks, process_group.group_name, number), self.rank, len(ranks)))
            return result

        return run

    def _locked(self, numel: int, dtype):
        tensor = torch.zeros(numel, dtype=dtype)
        if numel:
            self._kept.append(tensor)
            self._host(tensor.data_ptr(), tensor.numel() * tensor.element_size(), locked=True)
        return tensor

    def _register(self, address: int, size: int, flags: int) -> int:
        self._host(address, size, locked=True)
        return 0

    def _unregister(self, address: int) -> None:
        """Copies from or to this memory, and the end of its page-locking, are accesses to one thing."""
        begin = self._region(address)[0]
        self.engine.log(("access", "cudaHostUnregister", [((self.rank, "pinned", begin), 0, 1, True)]))

    def _frombuffer(self, original):
        def run(*args, **kwargs):
            tensor = original(*args, **kwargs)
            self._kept += [tensor, args[0]]
            self._host(tensor.data_ptr(), tensor.numel() * tensor.element_size())
            return tensor

        return run

    def _numpy(self, original):
        def run(tensor, *args, **kwargs):
            if tensor.numel() and self._region(tensor.data_ptr()) is None:
                self._join(self.engine.current())  # on a device it would have been copied to the host before
            return original(tensor, *args, **kwargs)

        return run

    def _cpu(self, original):
        def run(tensor, *args, **kwargs):
            if tensor.numel() == 0 or tensor.requires_grad or self._region(tensor.data_ptr()) is not None:
                return original(tensor, *args, **kwargs)
            with _disable_current_modes():
                there = self._to_host(torch.empty_like(tensor))
            return there.copy_(tensor)

        return run

    # The optimizer that steps on the host.

    def _host_optimizer(self, original):
        def run(own):
            original(own)
            own._d2h_stream, own._h2d_stream = torch.cuda.Stream(), torch.cuda.Stream()  # as with overlap
            for parameter in own.cpu_copys_map_gpu_param:
                self._to_host(parameter, locked=True)
                own.cpu_copy_map_grad[parameter] = parameter.grad = self._locked(
                    parameter.numel(), parameter.dtype
                ).view(parameter.shape)

        return run

    def _states(self, original):
        def run(own, group, *args, **kwargs):
            result = original(own, group, *args, **kwargs)
            for parameter in group["params"]:
                if self._region(parameter.data_ptr()) is not None:
                    for state in own.state[parameter].values():
                        self._to_host(state)
            return result

        return run

    def _early_steps(self, original):
        def run(own, *args, **kwargs):
            original(own, *args, **kwargs)
            self._to_host(own.memory)
            own.copying = _Lock(self.engine)

        return run

    def _exchange_buffer(self, original):
        def run(own, dtype, size):
            buffer = original(own, dtype, size)
            self._kept.append(buffer)
            if buffer.numel():
                self._host(buffer.data_ptr(), buffer.numel() * buffer.element_size())
            return buffer

        return run

    def _exchange(self, original):
        def run(own, shard, dp_rank):
            arriving = original(own, shard, dp_rank)
            self._exchanged(arriving, "begin of an exchange")
            return arriving

        return run

    def _arrived(self, original):
        def run(arriving):
            result = original(arriving)
            self._exchanged(arriving, "end of an exchange")
            return result

        return run

    def _exchanged(self, arriving, label: str) -> None:
        """With other nodes: the own shard is read, those of others are written, from the begin to the end."""
        if not arriving.works:
            return
        places = [(rank, self._place(shard)) for rank, shard in zip(arriving.ranks, arriving.shards)]
        self.engine.log(("access", label, [(*place, rank != self.rank) for rank, place in places if place]))

    def _finish(self, original):
        def run(transfer, error=None):
            if not transfer.ended:
                self._hand_over(transfer)
            original(transfer, error)

        return run

    def _wait(self, original):
        def run(transfer, *args):
            if not transfer.ended:
                self.engine.host_wait(f"Transfer at {self._where()}")
                end = time.monotonic() + self.engine.stuck_seconds
                while not transfer.ended:
                    time.sleep(0.0005)
                    if time.monotonic() > end:
                        raise RuntimeError(f"a transfer never ends, at {self._where()}")
            original(transfer, *args)
            self._take(transfer)

        return run

    def _store(self, original):
        def run(flags, row, rank, value):
            self.engine.log(("store", self.engine.flag(flags.address(row, rank)), value))
            original(flags, row, rank, value)

        return run

    def _pool(self, original):
        def run(pool, *args, **kwargs):
            original(pool, *args, **kwargs)
            name = ("pool", pool.pids[0], pool.bytes)
            self._host(pool.memory.data_ptr(), pool.bytes, key=name)
            for row in range(pool.reads_row + 1):
                for rank in range(pool.size):
                    self.engine.flag_names[pool.flags.address(row, rank)] = (name, row, rank)

        return run

    def _poll(self, original):
        def run(pool, row, value):
            end = time.monotonic() + self.engine.stuck_seconds
            while not (pool.flags.load(row) >= value).all() and not (pool.flags.load(row) < 0).any():
                time.sleep(0.0005)
                if time.monotonic() > end:
                    raise RuntimeError(f"a flag never comes, at {self._where()}")
            original(pool, row, value)
            for rank in range(pool.size):
                self.engine.log(("wait", self.engine.flag(pool.flags.address(row, rank)), value))

        return run

    def _comes_and_goes(self, original):
        def run(own, *args, **kwargs):
            storage = (args[1] if isinstance(own, gradients.Gradient) else args[2]).untyped_storage()
            self._blocks[storage._cdata] = self._blocks_made
            self._blocks_made += 1
            self._kept.append(storage)
            original(own, *args, **kwargs)
            if isinstance(own, gradients.Gradient):
                self._free.setdefault(("default stream", own.bytes), []).append(self._blocks[storage._cdata])
            own.resize = self._resized(storage, storage.resize_)

        return run

    def _memory_of(self, buffer) -> tuple:
        address = ctypes.addressof(ctypes.c_char.from_buffer(buffer)) if not hasattr(buffer, "ctypes") else None
        address = buffer.ctypes.data if address is None else address
        size = buffer.nbytes if hasattr(buffer, "nbytes") else len(buffer)
        region = self._region(address)
        if region is None:
            self._error(f"the drive is given device memory at {self._where()}")
            return (self.rank, address), 0, size
        return region[2], address - region[0], address - region[0] + size

    def _drive_write(self, original):
        def run(file, data, offset, label):
            if str(label).startswith("group"):
                name = ("drive", file.label)
                accesses = [(*self._memory_of(data), False), (name, offset, offset + data.nbytes, True)]
                self.engine.log(("access", "write to the drive", accesses))
            return original(file, data, offset, label)

        return run

    def _drive_start(self, original):
        def run(file, memory, offset, label, transfer, before_end=None, *, write=False):
            here = (*self._memory_of(memory), not write)
            there = (("drive", file.label), offset, offset + len(memory), write)
            what = f"{'written to' if write else 'read from'} the drive"
            token = self.engine.token()
            self.engine.log(("access", what, [here, there]), ("out", token))

            def ended():
                self.engine.log(("in", token), ("access", what, [here, there]))
                if before_end is not None:
                    before_end()

            return original(file, memory, offset, label, transfer, ended, write=write)

        return run

    def _step(self, begins: bool):
        def wrap(original):
            def run(own, *args, **kwargs):
                original(own, *args, **kwargs)
                self.engine.in_step = begins

            return run

        return wrap

    def _shard_of(self, original):
        def run(own, shard, start, numel, device=None):
            original(own, shard, start, numel, device)
            if device is not None:
                self._kept.append(own)
                self._moved.add(id(own))

        return run

    def _to_device(self, original):
        def run(own, index):
            found = original(own, index)
            if id(own) in self._moved and self._region(found.data_ptr()) is not None:
                with _disable_current_modes():
                    there = torch.empty_like(found)
                return there.copy_(found)
            return found

        return run


class _Lock:
    """A lock whose holders are ordered."""

    def __init__(self, engine: Engine):
        self._engine, self._lock, self._token = engine, threading.Lock(), None

    def __enter__(self):
        self._lock.acquire()
        if self._token is not None:
            self._engine.log(("in", self._token))

    def __exit__(self, *_):
        self._token = self._engine.token()
        self._engine.log(("out", self._token))
        self._lock.release()


class _Work:
    """Handle of a collective: the current stream waits for the communicator's."""

    def __init__(self, strict: StrictDevice, inner, token):
        self.strict, self.inner, self._token = strict, inner, token
        self._once, self._waited = threading.Lock(), False

    def wait(self, *args):
        engine, stream = self.strict.engine, self.strict.engine.current()
        engine.log_on(stream, ("in", self._token))
        if stream is engine.default:
            engine.until(lambda: self.inner is not None)
            return self._wait(*args)
        stream.add(self._wait_aside, lambda: self.inner is not None)
        return True

    def _wait_aside(self):
        """Some of gloo's handles know that they have ended only when they are waited for."""
        thread = threading.Thread(target=self._wait, daemon=True)
        thread.start()
        return lambda: not thread.is_alive()

    def _wait(self, *args):
        # Gloo copies some results each time they are waited for, also over what has been made of them since.
        with self._once, _disable_current_modes():
            if not self._waited:
                self.inner.wait(*args)
            self._waited = True

    def __getattr__(self, name):
        return getattr(self.inner, name)
