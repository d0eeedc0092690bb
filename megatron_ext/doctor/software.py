"""Versions of the software that trains, and what they mean for a scheduled run."""

import ctypes
import importlib
import importlib.metadata
import platform
import re
from importlib.util import find_spec

import torch
from torch.cuda import nccl

from megatron_ext.doctor.finding import Finding, failed, not_tried, passed
from megatron_ext.doctor.place import DoctorOptions, Place
from megatron_ext.runtime.routes.symmetric_gather import LEAST_NCCL
from megatron_ext.runtime.stream_flags import pip_line

LEAST_TORCH = (2, 6)
LEAST_KERNEL = (5, 14)


def check(place: Place, options: DoctorOptions) -> list[Finding]:
    """Python, kernel, PyTorch, CUDA, NCCL, Transformer Engine, Apex and cuda-bindings."""
    found = [passed("python", f"{platform.python_version()} on {platform.machine()}"), _kernel(), _torch()]
    found += _cuda(place) if place.on_cuda else [_no_cuda(options)]
    return [*found, _engine(), _apex(), _bindings(place)]


def version(package: str) -> str | None:
    """The version of an installed distribution, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def numbers(text: str) -> tuple[int, ...]:
    """The first two numbers of a version: ``2.10.0a0+nv`` gives (2, 10)."""
    return tuple(int(re.findall(r"^\d*", part)[0] or 0) for part in text.split(".")[:2])


def _kernel() -> Finding:
    release = platform.release()
    if numbers(release) < LEAST_KERNEL:
        return passed("kernel", f"{release}: pages of host copies are made one at a time, which takes longer", "")
    return passed("kernel", release)


def _torch() -> Finding:
    here = numbers(str(torch.__version__))
    if here < LEAST_TORCH:
        return failed("torch", str(torch.__version__), f"use PyTorch {LEAST_TORCH[0]}.{LEAST_TORCH[1]} or newer")
    means = "" if here >= (2, 8) else ": buffers of collectives are freed late; TORCH_NCCL_AVOID_RECORD_STREAMS is set"
    return passed("torch", f"{torch.__version__}{means}")


def _no_cuda(options: DoctorOptions) -> Finding:
    if options.device == "cpu" or torch.version.cuda is None:
        return not_tried("cuda", "no CUDA device: the following checks run on host processors")
    found, driver = f"this PyTorch is built for CUDA {torch.version.cuda} and does not find a device", driver_version()
    if driver is not None and driver[0] < numbers(torch.version.cuda)[0]:  # then torch sees none
        older = "the driver is too old for this PyTorch: update it, or install a PyTorch for the driver's CUDA"
        return failed("cuda", f"{found}; the driver is for {driver[0]}.{driver[1]}", older)
    advice = "check the driver (nvidia-smi); in a container: docker run --gpus all; or give --device cpu"
    return failed("cuda", found, advice)


def _cuda(place: Place) -> list[Finding]:
    found = f"{torch.cuda.get_device_name(place.device)}, CUDA {torch.version.cuda}"
    if (ranks := place.ranks_per_device) > 1:
        found += f", {ranks} ranks on one device: NCCL uses sockets, so times are not those of a device per rank"
    driver = driver_version()
    said = "the driver does not report its version" if driver is None else f"driver for {driver[0]}.{driver[1]}"
    return [passed("cuda", f"{found}, {said}"), _nccl()]


def driver_version() -> tuple[int, int] | None:
    """The CUDA version that the driver supports. The driver itself is asked: torch has no public name for it."""
    version = ctypes.c_int()
    try:
        code = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return None
    return (version.value // 1000, version.value % 1000 // 10) if code == 0 else None


def _nccl() -> Finding:
    here = nccl.version()  # numbers, and in some builds also a word
    text = ".".join(map(str, here))
    if here < (2, 18):
        return passed("nccl", f"{text}: several communicators in flight are not run in order", "use NCCL 2.18 or newer")
    means = "" if here >= LEAST_NCCL else ": no all-gathers by copy engines, so they use the GPU's multiprocessors"
    return passed("nccl", f"{text}{means}")


def _engine() -> Finding:
    if find_spec("transformer_engine") is None:
        return passed("transformer engine", "absent: Megatron needs --transformer-impl local")
    return passed("transformer engine", version("transformer_engine") or "no version known")  # either spelling


def _apex() -> Finding:
    if find_spec("apex") is None:
        return passed("apex", "absent and not needed: Megatron uses Transformer Engine's or torch's Adam")
    if find_spec("amp_C") is None:
        found = "a package of this name is installed, without NVIDIA's kernels (amp_C)"
        return failed("apex", found, "the package `apex` of PyPI is not NVIDIA's: pip uninstall apex")
    return passed("apex", f"{version('apex') or 'no version known'}, with kernels")


def _bindings(place: Place) -> Finding:
    if find_spec("cuda") and find_spec("cuda.bindings"):  # other packages also lie in ``cuda``
        here = version("cuda-bindings") or getattr(importlib.import_module("cuda.bindings"), "__version__", None)
        return passed("cuda-bindings", here or "no version known")
    if not place.on_cuda:
        return not_tried("cuda-bindings", "absent; only used with a CUDA device")
    return not_tried("cuda-bindings", "absent: schedules that copy between host and device are refused", pip_line())
