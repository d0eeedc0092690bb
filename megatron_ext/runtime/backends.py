"""The backends of torch.distributed by which process groups talk."""

HOST = "gloo"
"""Over host memory."""


def of_device(on_cuda: bool) -> str:
    """Over the memory of a CUDA device, or of the processor that stands for one."""
    return "nccl" if on_cuda else HOST
