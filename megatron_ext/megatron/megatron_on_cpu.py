"""What of Megatron is replaced where there is no GPU, because torch cannot answer for it."""

# Functions of Megatron are replaced here on purpose.
# pyright: reportAttributeAccessIssue=false

import contextlib
import copy
import importlib
import importlib.metadata
import importlib.util
import logging
import os
import sys
import sysconfig
import unittest.mock
from multiprocessing import spawn


def prepare() -> None:
    """What has to be so before any module of Megatron is imported."""
    _build_helpers_for_this_python()
    _hide_kernels()


def _build_helpers_for_this_python() -> None:
    """Megatron compiles its dataset helper by ``make``, for whichever python3 comes first.

    A virtual environment that is not activated is not on the path, and none of them has the
    ``python3-config`` that is asked for the suffix of the file.
    """
    folder = os.path.dirname(sys.executable)
    if folder not in os.environ.get("PATH", "").split(os.pathsep):
        os.environ["PATH"] = f"{folder}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    os.environ["MAKEFLAGS"] = f"{os.environ.get('MAKEFLAGS', '')} LIBEXT={suffix}".lstrip()


def replace() -> None:
    """Import what has to be changed of Megatron, and change it; each step names the releases that need it."""
    import_kernels_without_triton()
    _keep_sent_tensors()
    _offload_to_the_host()
    if _exists("megatron.legacy.fused_kernels"):  # up to 0.17: compiles with nvcc
        from megatron.legacy import fused_kernels

        fused_kernels.load = lambda args: None
    _skip_fp8_of_absent_engine()
    _route_without_engine()
    norm_parts_of_sequences()
    _start_managers_without_the_script()
    # "CPU RNG state changed within GPU RNG context", once a parameter: here they are one.
    logging.getLogger("megatron.core.tensor_parallel.random").setLevel(logging.ERROR)


def _exists(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def _hide_kernels() -> None:
    """Megatron takes optimizers and norms of Transformer Engine and Apex where it finds them. They run on devices
    alone, and may not even be imported without one."""
    for package, *extensions in (("transformer_engine",), ("apex", "amp_C")):
        if package not in sys.modules and _is_installed(package):
            for name in (package, *extensions):
                sys.modules[name] = None  # pyright: ignore[reportArgumentType] - to import it is an ImportError


def _is_installed(package: str) -> bool:
    """As a distribution: a stand-in that lies on the path is none."""
    try:
        place = importlib.metadata.distribution(package).locate_file("")
    except importlib.metadata.PackageNotFoundError:
        return False
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None and os.path.commonpath([spec.origin, str(place)]) == str(place)


def _keep_sent_tensors() -> None:
    """Up to 0.17 an activation is freed while gloo is still sending it, and losses turn NaN."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    post_init = TransformerConfig.__post_init__

    def keep(self):
        post_init(self)
        self.deallocate_pipeline_outputs = False

    TransformerConfig.__post_init__ = keep


def _offload_to_the_host() -> None:
    """``--optimizer-cpu-offload`` (from 0.11 on) asks every tensor whether it is on a GPU.

    All say yes here, the host copies too: they would be taken for the GPU's, be given no gradient,
    and nothing would be learned. Everything that is offloaded is the host's.
    """
    if not _exists("megatron.core.optimizer.cpu_offloading.hybrid_optimizer"):
        return
    from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer

    sort_parameters = HybridDeviceOptimizer._get_sub_optimizer_param_groups

    def on_host(self, offload_fraction):
        self.pin_cpu_grads = False  # there is nothing to pin memory for
        host, device, *maps = sort_parameters(self, offload_fraction)
        if offload_fraction == 1.0:
            host, device = host + device, []
        return host, device, *maps

    HybridDeviceOptimizer._get_sub_optimizer_param_groups = on_host


_KERNELS = (
    "megatron.core",
    "megatron.core.transformer.custom_layers.batch_invariant_kernels",
    "megatron.core.ssm.mamba_mixer",
)
"""Modules that import triton unasked, in some release, and are imported by pretrain_gpt.py."""


def import_kernels_without_triton() -> None:
    """0.16 and from 0.18 on import kernels written for triton, also where none of them is used.

    A CPU build of torch does not bring triton. While those modules are imported a stand-in takes
    its place, which accepts definitions of kernels; afterwards triton is absent as before.
    """
    if _exists("triton"):
        return
    with contextlib.suppress(ImportError, AttributeError):
        importlib.import_module("torch.utils._triton").has_triton_package()  # torch remembers the answer: no triton
    triton = unittest.mock.MagicMock()
    triton.__version__ = "0"  # too old for every module that asks before it uses triton
    triton.jit = lambda kernel=None, **options: kernel or (lambda kernel: kernel)
    stand_in = {"triton": triton, "triton.language": triton.language}
    sys.modules.update(stand_in)
    try:
        for name in _KERNELS:
            with contextlib.suppress(ImportError):  # absent, or an optional package is
                importlib.import_module(name)
    finally:
        for name in stand_in:
            del sys.modules[name]


def _skip_fp8_of_absent_engine() -> None:
    """0.12 without Transformer Engine refuses every optimizer step, also one without fp8."""
    if _exists("transformer_engine") or not _exists("megatron.core.fp8_utils"):
        return
    from megatron.core import fp8_utils

    # Not quantize_param_shard, which calls it: the optimizer has imported that by its name.
    if hasattr(fp8_utils, "_quantize_param_shard_impl"):
        fp8_utils._quantize_param_shard_impl = lambda *args, **kwargs: None


def _route_without_engine() -> None:
    """From 0.13 on the router of experts asks for a function of Transformer Engine that it then has not imported."""
    if _exists("megatron.core.transformer.moe.moe_utils"):
        with contextlib.suppress(ImportError):  # an optional package is absent
            moe_utils = importlib.import_module("megatron.core.transformer.moe.moe_utils")
            vars(moe_utils).setdefault("te_general_gemm", None)


def norm_parts_of_sequences() -> None:
    """Megatron refuses torch's norms under ``--sequence-parallel``. They compute on a part of a sequence as on all of
    it, and their gradients are then added up as those of other norms are."""
    # 0.9 has a layer norm alone, which is a module; later releases have a class that returns one of torch's.
    for name, kind, make in (
        ("torch_norm", "WrappedTorchNorm", "__new__"),
        ("torch_layer_norm", "WrappedTorchLayerNorm", "__init__"),
    ):
        if _exists(f"megatron.core.transformer.{name}"):
            return _take_whole(getattr(importlib.import_module(f"megatron.core.transformer.{name}"), kind), make)


def _take_whole(norm: type, make: str) -> None:
    original = getattr(norm, make)

    def whole(first, config, *args, **kwargs):
        other = copy.copy(config)
        other.sequence_parallel = False
        made = original(first, other, *args, **kwargs)
        for parameter in (made or first).parameters():
            vars(parameter)["sequence_parallel"] = config.sequence_parallel
        return made

    setattr(norm, make, staticmethod(whole) if make == "__new__" else whole)


def _start_managers_without_the_script() -> None:
    """``--ckpt-format torch_dist`` starts a manager of queues as a new process, which would import the training script
    and fail: it has no kernels and no CUDA. It has no use for the script."""
    prepare = spawn.get_preparation_data

    def without_script(name: str) -> dict:
        data = prepare(name)
        return {key: data[key] for key in data if not (name.startswith("SyncManager") and key.startswith("init_main"))}

    spawn.get_preparation_data = without_script
