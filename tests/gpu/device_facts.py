"""What the tier asks of a device before it begins, in a process of its own: one that has asked holds some of the
device's memory, and is the one process that a device in an exclusive mode takes.

``device_facts.py`` prints one line of JSON, see :class:`DeviceFacts`.
"""

import ctypes
import subprocess
import sys
from importlib.util import find_spec

import msgspec

from megatron_ext.formats.errors import InputError, one_line
from megatron_ext.formats.facts import Facts

SECONDS = 300.0
"""For an answer: from a network's file system libraries are read for minutes."""

COMPUTE_MODE, MODE_OF_EVERYONE = 20, 0
"""Of the driver's API: ``CU_DEVICE_ATTRIBUTE_COMPUTE_MODE``, ``CU_COMPUTEMODE_DEFAULT``."""


class DeviceFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Of the first device that is visible.

    Attributes:
        environment: as ``runtime.machine`` says it.
        name, free_bytes: of the device; None where torch sees none.
        node: its NUMA node, where there are several.
        no_flags: why its streams cannot wait for flags in host memory; empty where they can.
        one_process: it takes one process at a time.
    """

    environment: dict[str, Facts]
    name: str | None = None
    free_bytes: int | None = None
    node: int | None = None
    no_flags: str = ""
    one_process: bool = False


def ask() -> DeviceFacts:
    """The answer of a process. Raises InputError where it has none."""
    code, output, said = _of_process([__file__])
    if code:
        raise InputError(f"the device cannot be asked for its facts: {said}")
    return msgspec.json.decode(output.splitlines()[-1], type=DeviceFacts)


def why_no_engine() -> str:
    """Why Transformer Engine cannot be used; empty where it can. A package that is found need not be one that can be
    imported: of another CUDA, or without cuDNN."""
    if find_spec("transformer_engine") is None:
        return "it is not installed"
    code, _, said = _of_process(["-c", "import transformer_engine.pytorch"])
    return f"it cannot be imported: {said}" if code else ""


def _of_process(words: list[str]) -> tuple[int, str, str]:
    """Exit code, standard output, and the last line of standard error."""
    try:
        done = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return 1, "", f"no end after {SECONDS:.0f} s"
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    return done.returncode, done.stdout, one_line(lines[-1], 300) if lines else f"exit code {done.returncode}"


def device_facts() -> DeviceFacts:
    """In the process that is asked."""
    import torch

    from megatron_ext.runtime import host_threads, machine
    from megatron_ext.runtime.device import has_cuda
    from megatron_ext.runtime.stream_flags import open_stream_flags

    environment = machine.environment()
    if not has_cuda():
        return DeviceFacts(environment=environment)
    device = torch.device("cuda", 0)
    return DeviceFacts(
        environment=environment,
        name=torch.cuda.get_device_name(device),
        free_bytes=torch.cuda.mem_get_info(device)[0],
        node=host_threads.numa_node(device),
        no_flags=open_stream_flags(device)[1],
        one_process=_compute_mode() != MODE_OF_EVERYONE,
    )


def _compute_mode() -> int:
    """Of the first device that is visible, after torch has initialised the driver."""
    driver, found = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(MODE_OF_EVERYONE)
    driver.cuDeviceGetAttribute(ctypes.byref(found), COMPUTE_MODE, 0)
    return found.value


if __name__ == "__main__":
    print(msgspec.json.encode(device_facts()).decode(), flush=True)
