"""Kernels of Transformer Engine and Apex on the strict stand-in: they are the device's whatever memory they are given.

On a machine without them Megatron takes functions of its own that do the same with torch; these are run as the kernels
would be: queued on the current stream, in page-locked host memory as in the device's. Any other host memory is an
error.
"""

import sys
from unittest import mock

import torch
from strict_engine import where
from torch.utils._python_dispatch import _disable_current_modes

APPLIER = "multi_tensor_applier"
"""What every module that uses these kernels calls them by; its own import of it is replaced."""

READS_ALL, WRITES_LAST = ("l2norm", "l2_norm"), ("scale",)
"""Parts of the names of kernels that write nothing that they are given, or the last list only; of any other the first
list is taken to be gradients, which are read, and the rest to be written."""


class Kernels:
    """Patches of modules; ``strict`` is the stand-in."""

    def __init__(self, strict):
        self.strict, self.engine, self.memory = strict, strict.engine, strict.memory

    def patches(self):
        for module in list(sys.modules.values()):
            original = getattr(module, "__dict__", {}).get(APPLIER)
            if callable(original):
                yield mock.patch.object(module, APPLIER, self._applier(original))

    def _applier(self, original):
        def apply(op, noop, lists, *args):
            name = getattr(op, "__name__", "multi_tensor").removeprefix("local_")
            label = f"kernel {name} at {where()}"
            accesses, on_host, size = self._accesses(name, label, lists)
            engine, stream = self.engine, self.engine.current_work()
            engine.call(label)
            engine.launched(name, str([one[0].dtype for one in lists if one]))
            engine.log_on(stream, ("access", label, accesses))

            def run():
                with torch.no_grad(), _disable_current_modes():
                    return original(op, noop, lists, *args)

            if any(part in name for part in READS_ALL) or (stream is engine.default and not on_host):
                engine.until(lambda: not stream.items)  # its result is wanted, or all of it is compute
                return run()
            lists = self.strict.temporaries.lent(lists)  # as run() has them from now on
            stream.add(lambda: run() and None, size=size, what=label, accesses=accesses)
            return None

        return apply

    def _accesses(self, name: str, label: str, lists):
        accesses, on_host, size = [], False, 0
        for number, tensors in enumerate(lists):
            writes = not any(part in name for part in READS_ALL) and number > 0
            if any(part in name for part in WRITES_LAST):
                writes = number == len(lists) - 1
            for tensor in tensors:
                place = self.memory.place(tensor, label)
                if place is None:
                    continue
                region = self.memory.region(tensor.data_ptr())
                if region is not None:
                    region.by_kernel = True
                if region is not None and not region.locked:
                    self.engine.error(f"{label} is given host memory that is not page-locked")
                accesses.append((*place, writes))
                on_host, size = on_host or region is not None, size + tensor.nbytes * writes
        return accesses, on_host, size
