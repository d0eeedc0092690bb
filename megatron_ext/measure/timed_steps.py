"""Steps of Megatron's optimizer: on everything that a rank holds and, if it steps on the host
(``--optimizer-cpu-offload``), on one group. The run's own step of a group is in run_step.py."""

from abc import abstractmethod
from importlib.util import find_spec

import torch

from megatron_ext.measure.fabric import Fabric
from megatron_ext.measure.operation import DONE, Handle, Operation

PARAMETER_BYTES = 2
"""Bytes of one element of whole parameters: the host optimizer takes only 16-bit parameters."""

STATE_BYTES, DEVICE_BYTES = 16, 6
"""Bytes of one element in host memory (parameter, gradient and two moments, float32) and on the device (a float32
gradient and the parameter)."""


class TimedStep(Operation):
    """A step of an optimizer on tensors of one size. They are made when the size is first asked for."""

    builds = True
    _size: int | None = None

    def issue(self, size_bytes: int, round_index: int) -> Handle:
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

    def pieces(self, numel: int) -> list[int]:
        """The numbers of elements of the tensors of a shard: pieces of hidden_size**2 elements, like a model's
        weights."""
        piece = max(min(self.fabric.options.hidden_size**2, numel), 1)
        return [min(piece, numel - start) for start in range(0, numel, piece)]

    @abstractmethod
    def build(self, size_bytes: int) -> None:
        """Make the tensors of the shard."""

    @abstractmethod
    def step(self) -> None:
        """Make one step as training does."""


def clipping(gradients: list[torch.Tensor]) -> torch.Tensor:
    """The factor for all gradients that makes their norm at most 1."""
    return torch.clamp(1.0 / (torch.nn.utils.get_total_norm(gradients) + 1e-6), max=1.0)


class Optimizer(TimedStep):
    """One Adam step with gradient clipping on this rank's shard of ``size_bytes`` of whole parameters, as
    Megatron's ``DistributedOptimizer`` does it. It also zeroes the whole gradient buffer for the next iteration.

    If neither Transformer Engine nor apex is installed, Megatron scales gradients in two passes
    (``local_multi_tensor_scale``) and uses torch's Adam. With either of them it has one kernel for each.
    """

    name = "optimizer"

    def __init__(self, fabric: Fabric, busy: bool = False):
        super().__init__(fabric, busy)
        self.fused = fabric.torch_device.type == "cuda" and any(
            find_spec(name) for name in ("transformer_engine", "amp_C")
        )
        self._gradients: list[torch.Tensor] = []

    def step(self) -> None:
        scale = clipping(self._gradients)
        for gradient in self._gradients:
            gradient.mul_(scale) if self.fused else gradient.copy_(gradient * scale)
        self._optimizer.step()
        for parameter, main in zip(self._parameters, self._main):
            parameter.copy_(main.detach())
        self._buffer.zero_()

    def made_bytes(self, size_bytes: int) -> tuple[int, int]:
        """The shard's float32 parameters, gradients, two moments and temporaries of a step that is not fused; the
        shard's parameters as in the run; and the gradient buffer."""
        options, whole = self.fabric.options, self.fabric.options.elements(size_bytes)
        return 0, int((20 * whole + size_bytes) / options.data_parallel_size + 4 * whole * options.whole_part)

    def build(self, size_bytes: int) -> None:
        whole = self.fabric.options.elements(size_bytes)
        sizes = self.pieces(whole // self.fabric.options.data_parallel_size)
        self._main = [torch.ones(size, device=self.fabric.torch_device) for size in sizes]
        for main in self._main:
            main.requires_grad_().grad = torch.full_like(main, 1e-3)
        self._gradients = [main.grad for main in self._main if main.grad is not None]
        dtype = torch.float32 if 4 * whole == size_bytes else torch.bfloat16
        self._parameters = [torch.ones_like(main, dtype=dtype, requires_grad=False) for main in self._main]
        self._buffer = torch.ones(int(whole * self.fabric.options.whole_part), device=self.fabric.torch_device)
        self._optimizer = torch.optim.AdamW(self._main, lr=1e-4, fused=True if self.fused else None)


class TimedHostStep(TimedStep):
    """The step of this rank's shard of a group of ``size_bytes`` of 16-bit parameters: its float32 gradients are copied
    to the host, torch's fused AdamW steps there tensor by tensor, and the new parameters are copied back to the device,
    where they are cast. Megatron's parameters on the host are float32 copies of page-locked 16-bit ones. They are not
    page-locked themselves."""

    name = "host_step"
    settles = True

    def step(self) -> None:
        for own, gradient in zip(self._own_gradients, self.gradients):
            own.copy_(gradient, non_blocking=True)
        self.fabric.device.settle()
        self._optimizer.step()
        self.bring_back()

    def bring_back(self) -> None:
        """Copy the new parameters to the device."""
        for parameter, main in zip(self._parameters, self._main):
            parameter.copy_(main.detach(), non_blocking=True)

    def sizes(self, size_bytes: int) -> list[int]:
        """The numbers of elements of the tensors of the shard."""
        return self.pieces(max(size_bytes // PARAMETER_BYTES // self.fabric.options.data_parallel_size, 1))

    def build(self, size_bytes: int) -> None:
        fabric, sizes = self.fabric, self.sizes(size_bytes)
        self._own_gradients = [self.memory(size) for size in sizes]
        self._main = [torch.ones_like(gradient) for gradient in self._own_gradients]
        for main, gradient in zip(self._main, self._own_gradients):
            main.requires_grad_().grad = gradient
        self.gradients = [torch.full((size,), 1e-3, device=fabric.torch_device) for size in sizes]
        self._parameters = [torch.ones(size, dtype=torch.bfloat16, device=fabric.torch_device) for size in sizes]
        self._optimizer = torch.optim.AdamW(self._main, lr=1e-4, fused=True)

    def made_bytes(self, size_bytes: int) -> tuple[int, int]:
        return STATE_BYTES * sum(self.sizes(size_bytes)), DEVICE_BYTES * sum(self.sizes(size_bytes))

    def memory(self, numel: int) -> torch.Tensor:
        """A float32 tensor in the memory where gradients are stepped on."""
        return self.fabric.device.host_tensor(numel, torch.float32)


class DeviceStep(TimedHostStep):
    """The step of the same shard with its states on the device. It is fused, as Megatron asks for on the host and on
    the device (``fused=True``); Transformer Engine's and apex's optimizers have one kernel as well."""

    name = "device_step"
    settles = False

    def made_bytes(self, size_bytes: int) -> tuple[int, int]:
        return 0, sum(super().made_bytes(size_bytes))

    def step(self) -> None:
        self._optimizer.step()
        self.bring_back()

    def memory(self, numel: int) -> torch.Tensor:
        return torch.zeros(numel, device=self.fabric.torch_device)


class HostOptimizer(TimedHostStep):
    """The whole step of Megatron's optimizer when it steps on the host: the norm and clipping of all gradients on the
    device; the copies of gradients, AdamW and the copies of parameters for everything that this rank holds; and zeroing
    the whole gradient buffer."""

    name = "optimizer"

    def build(self, size_bytes: int) -> None:
        super().build(size_bytes)
        whole = int(size_bytes // PARAMETER_BYTES * self.fabric.options.whole_part)
        self._buffer = torch.ones(whole, device=self.fabric.torch_device)

    def made_bytes(self, size_bytes: int) -> tuple[int, int]:
        host, device = super().made_bytes(size_bytes)
        return host, device + int(4 * size_bytes // PARAMETER_BYTES * self.fabric.options.whole_part)

    def step(self) -> None:
        scale = clipping(self.gradients)
        for gradient in self.gradients:
            gradient.mul_(scale)
        super().step()
        self._buffer.zero_()
