"""The step of one group where the optimizer steps on the host (``--optimizer-cpu-offload``), as Megatron makes it. The
run's own step of it is in run_step.py."""

import torch

from megatron_ext.measure.operation import Step

PARAMETER_BYTES = 2
"""Of an element of whole parameters: the host optimizer takes 16-bit parameters alone."""

STATE_BYTES, DEVICE_BYTES = 16, 6
"""Of an element in host memory: parameter, gradient and two moments, float32. And on the device: a gradient in float32
and the parameter."""


class HostStep(Step):
    """This rank's shard of a group of ``size_bytes`` of 16-bit parameters: its float32 gradients to the host, torch's
    fused AdamW there, tensor by tensor, and the new parameters back to the device, where they are cast. Megatron's are
    float32 copies of page-locked 16-bit ones, and not page-locked themselves."""

    name = "host_step"
    settles = True

    def step(self) -> None:
        for own, gradient in zip(self._own_gradients, self.gradients):
            own.copy_(gradient, non_blocking=True)
        self.fabric.device.settle()
        self._optimizer.step()
        self.bring_back()

    def bring_back(self) -> None:
        """New parameters to the device."""
        for parameter, main in zip(self._parameters, self._main):
            parameter.copy_(main.detach(), non_blocking=True)

    def sizes(self, size_bytes: int) -> list[int]:
        """Elements of the tensors of the shard: as many as a model has weights of one layer's size."""
        options = self.fabric.options
        numel = max(size_bytes // PARAMETER_BYTES // options.data_parallel_size, 1)
        piece = max(min(options.hidden_size**2, numel), 1)
        return [min(piece, numel - start) for start in range(0, numel, piece)]

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
        """Of float32, where gradients are stepped on."""
        return self.fabric.device.host_tensor(numel, torch.float32)


class DeviceStep(HostStep):
    """The step of the same shard with its states on the device. Fused, as Megatron asks of the optimizer on either
    side (``fused=True``); Transformer Engine's and apex's have one kernel as well."""

    name = "device_step"
    settles = False

    def made_bytes(self, size_bytes: int) -> tuple[int, int]:
        return 0, sum(super().made_bytes(size_bytes))

    def step(self) -> None:
        self._optimizer.step()
        self.bring_back()

    def memory(self, numel: int) -> torch.Tensor:
        return torch.zeros(numel, device=self.fabric.torch_device)


class HostOptimizer(HostStep):
    """The whole step of Megatron's optimizer where it steps on the host: the norm of all gradients and their clipping
    on the device, gradients, AdamW and parameters of everything that this rank holds, and zeroes in the whole gradient
    buffer."""

    name = "optimizer"

    def build(self, size_bytes: int) -> None:
        super().build(size_bytes)
        whole = int(size_bytes // PARAMETER_BYTES * self.fabric.options.whole_part)
        self._buffer = torch.ones(whole, device=self.fabric.torch_device)

    def made_bytes(self, size_bytes: int) -> tuple[int, int]:
        host, device = super().made_bytes(size_bytes)
        return host, device + int(4 * size_bytes // PARAMETER_BYTES * self.fabric.options.whole_part)

    def step(self) -> None:
        scale = torch.clamp(1.0 / (torch.nn.utils.get_total_norm(self.gradients) + 1e-6), max=1.0)
        for gradient in self.gradients:
            gradient.mul_(scale)
        super().step()
        self._buffer.zero_()
