"""What this package and Megatron have of their own, for the strict stand-in: hand-overs between threads, flags, drives.

The package changes; what does not exist is left out, see :data:`TABLE`.
"""

import contextlib
import importlib
import os
import sys
import threading
import time
from unittest import mock

import numpy as np
import torch
from strict_engine import where
from strict_streams import StreamHandle
from torch.utils._python_dispatch import _disable_current_modes

HYBRID = "megatron.core.optimizer.cpu_offloading.hybrid_optimizer"
DDP = "megatron.core.distributed.distributed_data_parallel"

TABLE = (
    ("megatron_ext.runtime.device", "HostDevice", "device"),
    ("megatron_ext.runtime.worker", "Worker.submit", "submit"),
    ("megatron_ext.runtime.worker", "Transfer.finish", "finish"),
    ("megatron_ext.runtime.worker", "Transfer.wait", "wait"),
    ("megatron_ext.runtime.worker", "Transfer.finished", "wait"),
    ("megatron_ext.runtime.worker", "Transfer.ended", "ended"),
    ("megatron_ext.runtime.flags", "OrderedFlags.store", "store"),
    ("megatron_ext.runtime.flags", "OrderedFlags.load", "load"),
    ("megatron_ext.runtime.flags", "AtomicFlags.store", "store"),
    ("megatron_ext.runtime.flags", "AtomicFlags.load", "load"),
    ("megatron_ext.runtime.shared_flags", "OrderedFlags.store", "store"),
    ("megatron_ext.runtime.shared_flags", "OrderedFlags.load", "load"),
    ("megatron_ext.runtime.shared_flags", "AtomicFlags.store", "store"),
    ("megatron_ext.runtime.shared_flags", "AtomicFlags.load", "load"),
    ("megatron_ext.runtime.early_steps", "EarlySteps.__init__", "early_steps"),
    ("megatron_ext.runtime.host_step.early", "EarlySteps.__init__", "early_steps"),
    ("megatron_ext.runtime.node_exchange", "NodeExchange.buffer", "exchange_buffer"),
    ("megatron_ext.runtime.node_exchange", "NodeExchange.begin", "exchange"),
    ("megatron_ext.runtime.node_exchange", "Arriving.wait", "arrived"),
    ("megatron_ext.runtime.host_step.flat_adamw", "FlatAdamW.state_of", "states"),
    ("megatron_ext.runtime.drive", "DriveFile.write", "drive_write"),
    ("megatron_ext.runtime.drive", "DriveFile.start", "drive_start"),
    ("megatron_ext.runtime.drive", "DriveFile.map", "drive_map"),
    ("megatron_ext.runtime.executor", "Executor.begin_iteration", "step_begins"),
    ("megatron_ext.runtime.executor", "Executor.end_iteration", "steps_end"),
    ("megatron_ext.runtime.executor", "Executor.params_updated", "step_ends"),
    ("megatron_ext.runtime.executor", "Executor.unshard_all", "step_ends"),
    ("megatron_ext.megatron.shards", "ShardOf.__getitem__", "to_device"),
    (HYBRID, "HybridDeviceOptimizer._init_sub_optimizers", "host_optimizer"),
    (DDP, "DistributedDataParallel.__init__", "wrapped"),
    (DDP, "DistributedDataParallel._make_backward_post_hook", "post_hook"),
)
"""Module, what is replaced there, and the method of :class:`Runtime` that makes what replaces it."""

POLLS = 1000
"""So many loads of one flag in a row are a wait for it, and not a look."""


class Runtime:
    """Patches of :data:`TABLE`; ``strict`` is the stand-in."""

    def __init__(self, strict):
        self.strict, self.engine, self.memory, self.rank = strict, strict.engine, strict.memory, strict.rank
        self._handed: dict[int, tuple] = {}  # token of a transfer that has ended
        self.leaf_streams: list = []  # on which hooks add gradients
        self.added: list = []  # gradients of the backward that runs

    def patches(self):
        for module, path, name in TABLE:
            owner = sys.modules.get(module)
            if owner is None and ".runtime." in module:
                with contextlib.suppress(ModuleNotFoundError):  # an older package has it elsewhere
                    owner = importlib.import_module(module)
            *classes, attribute = path.split(".")
            for part in classes:
                owner = getattr(owner, part, None)
            if owner is not None and hasattr(owner, attribute):
                yield mock.patch.object(owner, attribute, getattr(self, name)(getattr(owner, attribute)))

    def device(self, original):
        from megatron_ext.runtime import device

        return lambda: device.CudaDevice(torch.device("cuda", 0))

    # Hand-overs between threads.

    def submit(self, original):
        def submit(own, function):
            token = self.engine.token()
            self.engine.log(("out", token))

            def run(transfer):
                self.engine.pause()
                self.engine.log(("in", token))
                return function(transfer)

            return original(own, run)

        return submit

    def finish(self, original):
        def run(transfer, error=None):
            if not transfer.ended:
                token = self._handed[id(transfer)] = self.engine.token()
                self.engine.log(("out", token))
            original(transfer, error)

        return run

    def wait(self, original):
        def run(transfer, *args):
            if not transfer.ended:
                if self.engine.in_step and threading.get_ident() == self.engine.main:
                    self.engine.host_waits.append(f"Transfer at {where()}")
                end = time.monotonic() + self.engine.stuck_seconds
                while not transfer.ended:
                    time.sleep(0.0005)
                    if time.monotonic() > end:
                        raise RuntimeError(f"a transfer never ends, at {where()}")
            original(transfer, *args)

        return run

    def ended(self, slot):
        """Who sees that a transfer has ended comes behind it."""

        def read(transfer):
            ended = slot.__get__(transfer)
            if ended and id(transfer) in self._handed:
                self.engine.log(("in", self._handed[id(transfer)]))
            return ended

        def write(transfer, value):
            if not value:
                self._handed.pop(id(transfer), None)  # of another that had this address
            slot.__set__(transfer, value)

        return property(read, write)

    def states(self, original):
        """Of a host optimizer that makes them itself: they lie on the host."""

        def state_of(own, parameter):
            state = original(own, parameter)
            for value in state.values():
                if self.memory.region(value.data_ptr()) is None:
                    self.memory.to_host(value)
            return state

        return state_of

    # Flags in memory that threads store and load.

    def store(self, original):
        def run(flags, row, rank, value):
            self.engine.log(("store", self.memory.name_of(flags.address(row, rank)), value))
            original(flags, row, rank, value)

        return run

    def load(self, original):
        """Who sees a value comes behind its store."""

        def run(flags, row, *rank):  # without a rank: of all of them, in an older runtime
            found = original(flags, row, *rank) if rank else np.array(original(flags, row))
            values = [found] if rank else found.tolist()
            self._polled([flags.address(row, n) for n in rank or range(len(values))], values)
            return found

        return run

    def _polled(self, addresses: list[int], values: list[int]) -> None:
        """Flags were looked at together. Raises RuntimeError where they are for too long what they were."""
        seen, now = self.engine.here.__dict__.setdefault("flags", {}), time.monotonic()
        before, since, last, polls = seen.get(addresses[0], ([0] * len(values), now, now, 0))
        for address, value, old in zip(addresses, values, before):
            if value > old:
                self.engine.log(("wait", self.memory.name_of(address), value))
        if values != before or now - last > 0.5:  # another wait
            since, polls = now, 0
        elif polls > POLLS and now - since > self.engine.stuck_seconds:
            raise RuntimeError(f"a flag never comes, at {where()}")
        seen[addresses[0]] = values, since, now, polls + 1

    # Gradients.

    def wrapped(self, original):
        """Megatron's training wraps chunks on a stream of its own. What it computes there is done at once, on the
        default stream."""

        def run(ddp, *args, **kwargs):
            self.leaf_streams.append(stream := torch.cuda.Stream())
            with mock.patch.object(torch.cuda, "current_stream", lambda device=None: stream):
                original(ddp, *args, **kwargs)

        return run

    def post_hook(self, original):
        """torch runs a parameter's hook on the stream that was current when the hook was made, behind the work that the
        gradient comes from. It gives the gradient's memory back to this stream: here it is kept until the end."""

        def make(ddp, parameter):
            hook, stream = original(ddp, parameter), torch.cuda.current_stream()

            def run(*args):
                stream.wait_stream(torch.cuda.current_stream())
                self.added.append(parameter.grad)
                with torch.cuda.stream(stream):
                    hook(*args)

            return run

        return make

    def backward_ends(self) -> None:
        """What comes next is behind the hooks of all parameters."""
        for stream in self.leaf_streams:
            torch.cuda.current_stream().wait_stream(stream)
        self.added.clear()

    # The optimizer that steps on the host.

    def host_optimizer(self, original):
        def run(own):
            original(own)
            own._d2h_stream, own._h2d_stream = torch.cuda.Stream(), _OwnCopies(self.engine)  # as with overlap
            for parameter in own.cpu_copys_map_gpu_param:
                self.memory.to_host(parameter)
                with _disable_current_modes():
                    gradient = torch.zeros(parameter.shape, dtype=parameter.dtype)
                own.cpu_copy_map_grad[parameter] = parameter.grad = self.memory.to_host(gradient, locked=True)

        return run

    def early_steps(self, original):
        def run(own, *args, **kwargs):
            original(own, *args, **kwargs)
            self.memory.to_host(own.memory)
            setattr(own, "copying" if hasattr(own, "copying") else "_copying", _Lock(self.engine))

        return run

    def to_device(self, original):
        def run(own, index):
            found = original(own, index)
            if getattr(own, "device", None) is not None and self.memory.region(found.data_ptr()) is not None:
                with _disable_current_modes():
                    there = torch.empty_like(found)
                return there.copy_(found)
            return found

        return run

    # Other nodes.

    def exchange_buffer(self, original):
        return lambda own, dtype, size: self.memory.to_host(original(own, dtype, size))

    def exchange(self, original):
        def run(own, shard, dp_rank):
            arriving = original(own, shard, dp_rank)
            self._exchanged(arriving, "begin of an exchange")
            return arriving

        return run

    def arrived(self, original):
        def run(arriving):
            result = original(arriving)
            self._exchanged(arriving, "end of an exchange")
            return result

        return run

    def _exchanged(self, arriving, label: str) -> None:
        """With other nodes: the own shard is read, those of others are written, from the begin to the end."""
        if arriving.works:
            places = [(rank, self.memory.place(shard, label)) for rank, shard in zip(arriving.ranks, arriving.shards)]
            self.engine.log(("access", label, [(*place, rank != self.rank) for rank, place in places if place]))

    # The drive.

    def drive_write(self, original):
        def run(file, data, offset, label):
            if str(label).startswith("group"):
                here = (*self.memory.place_of_buffer(data, "a write to the drive"), False)
                there = (_file(file), offset, offset + data.nbytes, True)
                self.engine.log(("access", "write to the drive", [here, there]))
            return original(file, data, offset, label)

        return run

    def drive_start(self, original):
        def run(file, memory, offset, label, transfer, before_end=None, *, write=False):
            what = f"{'written to' if write else 'read from'} the drive"
            here = (*self.memory.place_of_buffer(memory, what), not write)
            there = (_file(file), offset, offset + len(memory), write)
            token = self.engine.token()
            self.engine.log(("access", what, [here, there]), ("out", token))

            def ended():
                self.engine.log(("in", token), ("access", what, [here, there]))
                if before_end is not None:
                    before_end()

            return original(file, memory, offset, label, transfer, ended, write=write)

        return run

    def drive_map(self, original):
        def run(file, offset, size_bytes, label):
            there = (_file(file), offset, offset + size_bytes, False)
            self.engine.log(("access", "read through a map of the drive", [there]))
            return original(file, offset, size_bytes, label)

        return run

    # Iterations.

    def step_begins(self, original):
        return self._step(original, True)

    def step_ends(self, original):
        return self._step(original, False)

    def steps_end(self, original):
        def run(own):
            original(own)
            self.memory.in_steps = False

        return run

    def _step(self, original, begins: bool):
        def run(own, *args, **kwargs):
            if original.__name__ != "params_updated":  # what publishes, and begins the next iteration
                self.strict.dear.training = begins
            if begins:
                self.memory.in_steps = self.memory.begun = True
            result = original(own, *args, **kwargs)
            self.engine.in_step = begins
            return result

        return run


class _OwnCopies(StreamHandle):
    """Of parameters to the device. Before core_v0.16 the host optimizer waits for another stream than this one."""

    def record_event(self, event=None):
        recorded = super().record_event(event)
        vars(recorded)["wait"] = lambda stream=None: None
        return recorded


def _file(file) -> tuple[str, int]:
    """The same on all ranks that share it; a process may have made several."""
    named = vars(file)
    descriptor = named.get("descriptor", named.get("_buffered"))  # the second in an older runtime
    return "drive", os.fstat(descriptor).st_ino


class _Lock:
    """A lock whose holders are ordered."""

    def __init__(self, engine):
        self._engine, self._lock, self._token = engine, threading.Lock(), None

    def __enter__(self):
        self._lock.acquire()
        if self._token is not None:
            self._engine.log(("in", self._token))

    def __exit__(self, *_):
        self._token = self._engine.token()
        self._engine.log(("out", self._token))
        self._lock.release()
