"""The backends of torch.distributed that the process groups use."""

HOST = "gloo"
"""For tensors in host memory."""


def of_device(on_cuda: bool) -> str:
    """The backend for tensors on a CUDA device, or on the CPU that stands in for one."""
    return "nccl" if on_cuda else HOST
