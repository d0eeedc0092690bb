"""Say in one line why PyTorch sees no CUDA device on a machine that has one; nothing on others, and where it sees it:

    python scripts/why_no_device.py

Without it everything would run on the processor, and look as if it had run on the device.
"""

import os

from megatron_ext.cpubench import allocator
from megatron_ext.formats.errors import one_line


def why() -> str:
    """In torch's words; empty where there is nothing to say."""
    if not allocator.may_have_cuda(os.environ):
        return ""
    import torch  # takes seconds, on a machine without a device for nothing

    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        reason = one_line(str(error)).partition(". ")[0].rstrip(".")
        return f"PyTorch {torch.__version__} (CUDA {torch.version.cuda}) sees no GPU here: {reason}"
    return ""


if __name__ == "__main__":
    if reason := why():
        print(
            f"{reason}. Everything runs on processors. To use the GPU, activate an environment whose PyTorch sees it "
            "(or give its PYTHON), rm -rf .venv, and set up again"
        )
