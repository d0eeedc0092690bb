"""Operations of one rank alone: the optimizer's step, an addition on the host, products of matrices."""

from importlib.util import find_spec

import torch

from megatron_ext.measure.fabric import Fabric
from megatron_ext.measure.operation import DONE, Operation, Step


class Optimizer(Step):
    """One Adam step with gradient clipping on this rank's shard of ``size_bytes`` of whole parameters, as
    Megatron's ``DistributedOptimizer`` does it, and zeroes in the whole gradient buffer for the next iteration.

    Where neither Transformer Engine nor apex is installed, Megatron scales gradients in two passes
    (``local_multi_tensor_scale``) and takes torch's Adam; with either it has one kernel for each.
    """

    name = "optimizer"

    def __init__(self, fabric: Fabric, busy: bool = False):
        super().__init__(fabric, busy)
        self.fused = fabric.torch_device.type == "cuda" and any(
            find_spec(name) for name in ("transformer_engine", "amp_C")
        )
        self._gradients: list[torch.Tensor] = []

    def step(self) -> None:
        norm = torch.nn.utils.get_total_norm(self._gradients)
        scale = torch.clamp(1.0 / (norm + 1e-6), max=1.0)
        for gradient in self._gradients:
            gradient.mul_(scale) if self.fused else gradient.copy_(gradient * scale)
        self._optimizer.step()
        for parameter, main in zip(self._parameters, self._main):
            parameter.copy_(main.detach())
        self._buffer.zero_()

    def made_bytes(self, size_bytes: int) -> tuple[int, int]:
        """Of the shard: parameters in 32 bits and as in the run, gradients, two moments, what a step that is not fused
        makes; and the buffer."""
        options, whole = self.fabric.options, self.fabric.options.elements(size_bytes)
        return 0, int((20 * whole + size_bytes) / options.data_parallel_size + 4 * whole * options.whole_part)

    def build(self, size_bytes: int) -> None:
        whole = self.fabric.options.elements(size_bytes)
        numel = whole // self.fabric.options.data_parallel_size
        # As many tensors as a model has weights of one layer's size; one call each.
        piece = max(min(self.fabric.options.hidden_size**2, numel), 1)
        self._main = [
            torch.ones(min(piece, numel - start), device=self.fabric.torch_device) for start in range(0, numel, piece)
        ]
        for main in self._main:
            main.requires_grad_().grad = torch.full_like(main, 1e-3)
        self._gradients = [main.grad for main in self._main if main.grad is not None]
        dtype = torch.float32 if 4 * whole == size_bytes else torch.bfloat16
        self._parameters = [torch.ones_like(main, dtype=dtype, requires_grad=False) for main in self._main]
        self._buffer = torch.ones(int(whole * self.fabric.options.whole_part), device=self.fabric.torch_device)
        self._optimizer = torch.optim.AdamW(self._main, lr=1e-4, fused=True if self.fused else None)


class HostAdd(Operation):
    """A gradient shard of ``size_bytes`` of float32 added to another in host memory."""

    name = "host_add"
    builds = True
    by_host = True
    _sum = _part = torch.zeros(0)

    def issue(self, size_bytes: int, round_index: int):
        if size_bytes > self._sum.numel() * 4:
            self._sum, self._part = torch.zeros(2, size_bytes // 4).unbind()
        self._sum[: size_bytes // 4].add_(self._part[: size_bytes // 4])
        return DONE


class MatrixProduct(Operation):
    """Products of the model's shapes: (sequence * micro-batch, hidden) x (hidden, 4 hidden) and
    back, until about a millisecond has passed. ``size_bytes`` does not matter. On a device in bfloat16, as training:
    float32 leaves its tensor cores, and so its memory and power, to the transfers during it."""

    name = "compute"

    def __init__(self, fabric: Fabric, busy: bool = False):
        super().__init__(fabric, busy)
        options = fabric.options
        rows, hidden = options.seq_length * options.micro_batch_size, options.hidden_size
        how: dict = {"device": fabric.torch_device}
        how["dtype"] = torch.float32 if fabric.torch_device.type == "cpu" else torch.bfloat16
        self.input, self.up, self.down = (
            torch.ones(*shape, **how) for shape in ((rows, hidden), (hidden, 4 * hidden), (4 * hidden, hidden))
        )
        # 5e10 FLOP/s is the order of one processor thread; an accelerator gets more products.
        rate = 5e10 if fabric.torch_device.type == "cpu" else 2e14
        self.products = max(int(1e-3 * rate / (16 * rows * hidden * hidden)), 1)

    def issue(self, size_bytes: int, round_index: int):
        with torch.no_grad():
            for _ in range(self.products):
                torch.mm(torch.mm(self.input, self.up), self.down)
        return DONE
