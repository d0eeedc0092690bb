"""Print in one line why PyTorch sees no CUDA device on a machine that has one. Print nothing on other machines, or if
PyTorch sees the device:

    python scripts/why_no_device.py

Without this line everything would run on the CPU and look as if it had run on the device.
"""

import os

from megatron_ext.cpubench import allocator
from megatron_ext.formats.errors import one_line


def why() -> str:
    """The reason in torch's words; empty if there is nothing to say."""
    if not allocator.may_have_cuda(os.environ):
        return ""
    import torch  # takes seconds; not needed on a machine without a device

    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        reason = one_line(str(error)).partition(". ")[0].rstrip(".")
        return f"PyTorch {torch.__version__} (CUDA {torch.version.cuda}) sees no GPU here: {reason}"
    return ""


if __name__ == "__main__":
    if reason := why():
        print(
            f"{reason}. Everything runs on the CPU. To use the GPU, activate an environment whose PyTorch sees it "
            "(or give its PYTHON), rm -rf .venv, and set up again"
        )
