"""Steps of Megatron's optimizer: on everything that a rank holds and, if it steps on the host
(``--optimizer-cpu-offload``), on one group. The run's own step of a group is in run_step.py."""

from importlib.util import find_spec

import torch

from megatron_ext.measure.fabric import Fabric
from megatron_ext.measure.operation import DONE, Operation
from megatron_ext.runtime.worker import Waitable

PARAMETER_BYTES = 2
"""Bytes of one element of whole parameters: the host optimizer takes only 16-bit parameters."""

STATE_BYTES = 16
"""Bytes of one element where it is stepped: parameter, gradient and two moments, float32."""


class TimedHostStep(Operation):
    """The step of this rank's shard of a group of ``size_bytes`` of 16-bit parameters: its float32 gradients are copied
    to the host, torch's fused AdamW steps there tensor by tensor, and the new parameters are copied back to the device,
    where they are cast. Megatron's parameters on the host are float32 copies of page-locked 16-bit ones. They are not
    page-locked themselves. The tensors are made when a size is first asked for."""

    name = "host_step"
    builds = True
    settles = True
    fused = True
    _size: int | None = None

    def issue(self, size_bytes: int, round_index: int) -> Waitable:
        if size_bytes != self._size:
            self.build(size_bytes)
            self._size = size_bytes
        self.step()
        return DONE

    def drop(self) -> None:
        """Free the tensors, page-locked ones too: steps of other sizes, and other steps, need the memory."""
        self.close()
        fabric, busy = self.fabric, self.busy
        vars(self).clear()
        self.__init__(fabric, busy)
        fabric.device.close()

    def step(self) -> None:
        """Make one step as training does."""
        self.bring()
        self._optimizer.step()
        for parameter, main in zip(self._parameters, self._main):
            parameter.copy_(main.detach(), non_blocking=True)

    def bring(self) -> None:
        """Copy the gradients to where they are stepped on."""
        for stepped, gradient in zip(self._stepped, self.gradients):
            stepped.copy_(gradient, non_blocking=True)
        self.fabric.device.settle()

    def elements(self, size_bytes: int) -> int:
        """The number of elements of ``size_bytes`` of whole parameters."""
        return size_bytes // PARAMETER_BYTES

    def sizes(self, size_bytes: int) -> list[int]:
        """The numbers of elements of the tensors of the shard: pieces of hidden_size**2 elements, like a model's
        weights."""
        numel = max(self.elements(size_bytes) // self.fabric.options.data_parallel_size, 1)
        piece = min(self.fabric.options.hidden_size**2, numel)
        return [min(piece, numel - start) for start in range(0, numel, piece)]

    def build(self, size_bytes: int) -> None:
        """Make the tensors of the shard."""
        sizes, place = self.sizes(size_bytes), self.fabric.torch_device
        self.gradients = [torch.full((size,), 1e-3, device=place) for size in sizes]
        self._stepped = [self.stepped_on(gradient) for gradient in self.gradients]
        self._main = [torch.ones_like(stepped) for stepped in self._stepped]
        for main, stepped in zip(self._main, self._stepped):
            main.requires_grad_().grad = stepped
        dtype = torch.float32 if 4 * self.elements(size_bytes) == size_bytes else torch.bfloat16
        self._parameters = [torch.ones(size, dtype=dtype, device=place) for size in sizes]
        self._optimizer = torch.optim.AdamW(self._main, lr=1e-4, fused=self.fused or None)

    def made_bytes(self, size_bytes: int) -> tuple[int, int]:
        numel = sum(self.sizes(size_bytes))
        return STATE_BYTES * numel, 4 * numel + size_bytes // self.fabric.options.data_parallel_size

    def stepped_on(self, gradient: torch.Tensor) -> torch.Tensor:
        """The memory from which a gradient is stepped."""
        return self.fabric.device.host_tensor(gradient.numel(), torch.float32)


class DeviceStep(TimedHostStep):
    """The step of the same shard with its states on the device. It is fused, as Megatron asks for on the host and on
    the device (``fused=True``); Transformer Engine's and apex's optimizers have one kernel as well."""

    name = "device_step"
    settles = False

    def made_bytes(self, size_bytes: int) -> tuple[int, int]:
        """All of it, and the temporaries of a step that is not fused."""
        return 0, sum(super().made_bytes(size_bytes))

    def bring(self) -> None:
        return  # they are there

    def stepped_on(self, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


class HostOptimizer(TimedHostStep):
    """The whole step of Megatron's optimizer when it steps on the host: the norm and clipping of all gradients on the
    device; the copies of gradients, AdamW and the copies of parameters for everything that this rank holds; and zeroing
    the whole gradient buffer for the next iteration."""

    name = "optimizer"

    def _buffer_numel(self, size_bytes: int) -> int:
        return int(self.elements(size_bytes) * self.fabric.options.whole_part)

    def build(self, size_bytes: int) -> None:
        super().build(size_bytes)
        self._buffer = torch.ones(self._buffer_numel(size_bytes), device=self.fabric.torch_device)

    def made_bytes(self, size_bytes: int) -> tuple[int, int]:
        host, device = super().made_bytes(size_bytes)
        return host, device + 4 * self._buffer_numel(size_bytes)

    def step(self) -> None:
        scale = torch.clamp(1.0 / (torch.nn.utils.get_total_norm(self.gradients) + 1e-6), max=1.0)  # for a norm of 1
        for gradient in self.gradients:
            gradient.mul_(scale) if self.fused else gradient.copy_(gradient * scale)
        super().step()
        self._buffer.zero_()


class Optimizer(HostOptimizer, DeviceStep):
    """The same step as Megatron's ``DistributedOptimizer`` makes it on the device.

    If neither Transformer Engine nor apex is installed, Megatron scales gradients in two passes
    (``local_multi_tensor_scale``) and uses torch's Adam. With either of them it has one kernel for each.
    """

    def __init__(self, fabric: Fabric, busy: bool = False):
        super().__init__(fabric, busy)
        on_device = fabric.torch_device.type == "cuda"
        self.fused = on_device and any(find_spec(name) for name in ("transformer_engine", "amp_C"))

    def elements(self, size_bytes: int) -> int:
        return self.fabric.options.elements(size_bytes)
