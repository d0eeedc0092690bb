"""For gradients that rest in host memory, the CPU computes the norm and clips.

[Note: Kernels on page-locked memory]
Transformer Engine's and Apex's multi-tensor operations run as device kernels on whatever memory they are given; they
access page-locked memory over PCIe. They run when the stream gets to them. The host's optimizer then reads the same
gradients on the CPU, which is not ordered by any stream, so it may step on gradients that are not clipped yet. So the
operations with which Megatron computes the norm and clips are divided: the kernel gets the tensors on the device,
and the CPU computes at once on the tensors in host memory. A run in which Megatron gathers (the reference) has the same
division, so both add up the norm in the same order.
Source: megatron/core/optimizer/clip_grads.py, the same names in core_v0.12 to core_v0.19.
"""

# A function of Megatron is replaced here on purpose.
# pyright: reportAttributeAccessIssue=false

import weakref

import torch
from megatron.core.optimizer import clip_grads

ROW = 1 << 14
"""Elements whose squares one thread adds up at a time, so that the result does not depend on the number of threads."""

_resting: "weakref.WeakValueDictionary[int, torch.UntypedStorage]" = weakref.WeakValueDictionary()


def rest_on_host(gradient: torch.Tensor) -> None:
    """Let the CPU compute the norm of ``gradient``, in host memory, and clip it, until its storage is freed."""
    storage = gradient.untyped_storage()
    assert storage.device.type == "cpu"
    _resting[storage.data_ptr()] = storage
    if not hasattr(clip_grads.multi_tensor_applier, "kernel"):
        clip_grads.multi_tensor_applier = _Divided(clip_grads.multi_tensor_applier)


def rests_on_host(gradient: torch.Tensor) -> bool:
    """Whether :func:`rest_on_host` was called for the storage of ``gradient``."""
    return gradient.untyped_storage().data_ptr() in _resting


class _Divided:
    """Takes the place of Megatron's ``multi_tensor_applier``.

    Attributes:
        kernel: the function that it replaces.
    """

    def __init__(self, kernel):
        self.kernel = kernel

    def __call__(self, operation, overflow: torch.Tensor, lists: list, *arguments):
        on_host = [rests_on_host(tensor) for tensor in lists[0]]
        if not any(on_host):
            return self.kernel(operation, overflow, lists, *arguments)
        host, device = ([[t for t, h in zip(own, on_host) if h is side] for own in lists] for side in (True, False))
        result = self.kernel(operation, overflow, device, *arguments) if device[0] else None
        if operation is clip_grads.l2_norm_impl:
            return _norm(host[0], None if result is None else result[0], overflow.device), None
        factor = float(arguments[0])  # on the device in some releases; 1 there if nothing is clipped
        for source, scaled in zip(*host, strict=True):
            if factor != 1.0 or source is not scaled:
                torch.mul(source, factor, out=scaled)
        return result


@torch.no_grad()
def _norm(gradients: list[torch.Tensor], others: torch.Tensor | None, device: torch.device) -> torch.Tensor:
    """The 2-norm of ``gradients`` together with other tensors, whose norm is ``others``: fp32 of shape ``(1,)`` on
    ``device``."""
    squares = torch.stack([_sum_of_squares(gradient.view(-1)) for gradient in gradients]).sum()
    norm = torch.empty(1, device=device).copy_(squares.sqrt())
    return norm if others is None else (norm**2 + others**2).sqrt()


def _sum_of_squares(gradient: torch.Tensor) -> torch.Tensor:
    """The sum of squares of a 1D tensor, as float64; each row of :data:`ROW` elements is added up in fp32."""
    end = gradient.numel() // ROW * ROW
    whole, rest = gradient[:end].view(-1, ROW), gradient[end:].view(1, -1)
    rows = [row for row in (whole, rest) if row.numel()] or [rest]
    norms = torch.cat([torch.linalg.vector_norm(row, dim=1, dtype=torch.float32) for row in rows])
    return norms.double().square().sum()
