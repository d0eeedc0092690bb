"""What the processor reads of tensors but not by an operation of torch, for the strict stand-in: as a list or a NumPy
array, as a file, and copies to the host. What is written through an array is not seen."""

import weakref

import torch
from strict_engine import where
from torch.utils._python_dispatch import _disable_current_modes


class HostReads:
    """Patches; ``strict`` is the stand-in."""

    def __init__(self, strict):
        self.engine, self.memory = strict.engine, strict.memory

    def patches(self):
        for name in ("numpy", "tolist"):
            yield torch.Tensor, name, self._read
        for name in ("cpu", "to"):
            yield torch.Tensor, name, self._copied
        yield torch._C.PyTorchFileWriter, "write_record", self._written

    def _is_of_device(self, tensor: torch.Tensor) -> bool:
        return tensor.numel() > 0 and self.memory.region(tensor.data_ptr()) is None and not self.engine.closed

    def _log(self, what: str, places: list[tuple]) -> None:
        if not self.engine.closed:
            self.engine.log(("access", f"{what}, by the processor", [(*place, False) for place in places if place]))

    def _read(self, original):
        name = original.__name__

        def run(tensor, *args, **kwargs):
            if self._is_of_device(tensor):  # it would have been copied to the host before
                self.engine.synchronize([self.engine.current_work()], name)
                return original(tensor, *args, **kwargs)
            what, places = f"{name} at {where()}", [self.memory.place(tensor, name)]
            self._log(what, places)
            result = original(tensor, *args, **kwargs)
            if name == "numpy" and result.size:  # it may be read as long as it is there
                weakref.finalize(result, self._log, f"the end of an array of {what}", places).atexit = False
            return result

        return run

    def _copied(self, original):
        """To the host. As with torch, the copy is page-locked and not waited for where ``non_blocking`` says so."""

        def run(tensor, *args, **kwargs):
            to_host = original.__name__ == "cpu" or "cpu" in (*args[:1], kwargs.get("device"))
            if original.__name__ == "to" and not to_host:  # other devices by position: cuda_stand_in.py knows no patch
                devices = (str, int, torch.device)
                args = [torch.device("cpu") if isinstance(one, devices) else one for one in args[:1]] + [*args[1:]]
            again = getattr(self.engine.here, "copied", False)  # cuda_stand_in.py calls it again, for the CPU
            if again or not to_host or not self._is_of_device(tensor) or tensor.requires_grad:
                self.engine.here.copied = True
                try:
                    return original(tensor, *args, **kwargs)
                finally:
                    self.engine.here.copied = again
            dtype = next((one for one in (*args, kwargs.get("dtype")) if isinstance(one, torch.dtype)), tensor.dtype)
            later = kwargs.get("non_blocking", False)
            with _disable_current_modes():
                there = self.memory.to_host(torch.empty_like(tensor, dtype=dtype), locked=later)
            return there.copy_(tensor, non_blocking=later)

        return run

    def _written(self, original):
        """By ``torch.save``, which copies what is on the device to the host."""

        def run(writer, name, data, *args):
            if isinstance(data, torch.UntypedStorage) and data.nbytes() and not self.engine.closed:
                with _disable_current_modes():
                    tensor = torch.empty(0, dtype=torch.uint8).set_(data)
                what, place = f"torch.save at {where()}", self.memory.place(tensor, "torch.save")
                if self._is_of_device(tensor):
                    stream = self.engine.current_work()
                    self.engine.log_on(stream, ("access", what, [(*place, False)]))
                    self.engine.synchronize([stream], "torch.save")
                else:
                    self._log(what, [place])
            return original(writer, name, data, *args)

        return run
