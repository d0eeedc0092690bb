"""Keep freed blocks of host memory in the process, so that taking them again is cheap.

glibc gives a large block back to the kernel when it is freed, and the next block costs a page
fault for every 4 KiB. In a measurement, restoring a layer then cost more in faults than in copying.
CUDA's caching allocator keeps freed blocks by itself.

[Note: One arena]
glibc gives threads arenas of their own, in heaps of 64 MiB, and a second heap of an arena goes back to
the kernel at every free. Which of gloo's threads share an arena varies from run to run, so reducing
26 MB took 45 ms in some runs and 150 ms in others. With one arena for all threads it takes 40 ms every time.

[Note: From the first block on]
glibc keeps freed blocks up to a size that it raises as blocks are freed, up to 32 MiB. So it also varies from run to
run which buffers of gloo are new at every collective: 10,000 page faults per iteration were measured in one run of a
model and 44,000 in another, which is 4 % of its time. Ranks that our launchers start keep all blocks from the first
one on, whether they run stock Megatron, train by a schedule or measure. Without our launcher a scheduled run on the
CPU keeps blocks from the point at which it is prepared.
Source: mallopt(3).
"""

import ctypes
import os
from collections.abc import Mapping
from pathlib import Path

ENVIRONMENT = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}
"""Environment of ranks on the CPU; the user's own settings take precedence."""

CUDA_DEVICES = (Path("/dev/nvidiactl"), Path("/dev/dxg"))
"""Files of which one exists if a process can have a CUDA device; the second is that of Windows Subsystem for Linux."""

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4


def rank_variables(device: str = "auto") -> dict[str, str]:
    """:data:`ENVIRONMENT` for ranks on the CPU; empty for ranks that may have a CUDA device.

    With a CUDA device the host's allocator serves data loaders and checkpoints, which free what they take.

    Args:
        device: ``cpu``, ``cuda``, or ``auto``, which depends on whether there is a CUDA device that is not hidden.
    """
    on_cuda = device == "cuda" or (device == "auto" and may_have_cuda(os.environ))
    return {} if on_cuda else dict(ENVIRONMENT)


def may_have_cuda(environment: Mapping[str, str]) -> bool:
    """Whether a process with these variables may have a CUDA device: one exists and is not hidden."""
    hidden = environment.get("CUDA_VISIBLE_DEVICES", "all") in ("", "-1")
    return not hidden and any(path.exists() for path in CUDA_DEVICES)


def keep_freed_blocks() -> bool:
    """Serve blocks of any size from the heap and never shrink it, unless the user has set one of :data:`ENVIRONMENT`
    to something else: a user who is short of memory wants freed blocks to go back to the kernel.

    Returns:
        Whether freed blocks are kept. If they are not, restoring is slower but correct.
    """
    if any(os.environ.get(name, value) != value for name, value in ENVIRONMENT.items()):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return bool(mallopt(_M_MMAP_MAX, 0)) and bool(mallopt(_M_TRIM_THRESHOLD, -1))
