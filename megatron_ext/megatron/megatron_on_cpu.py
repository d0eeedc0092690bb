"""The parts of Megatron that are replaced if there is no GPU, because replacing torch.cuda is not enough for them."""

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
    """Prepare what is needed before any module of Megatron is imported."""
    _build_helpers_for_this_python()
    _hide_kernels()


def _build_helpers_for_this_python() -> None:
    """Megatron compiles its dataset helper with ``make``, for the first python3 on the path.

    A virtual environment that is not activated is not on the path, and no virtual environment has the
    ``python3-config`` that is asked for the suffix of the file.
    """
    folder = os.path.dirname(sys.executable)
    if folder not in os.environ.get("PATH", "").split(os.pathsep):
        os.environ["PATH"] = f"{folder}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    os.environ["MAKEFLAGS"] = f"{os.environ.get('MAKEFLAGS', '')} LIBEXT={suffix}".lstrip()


def replace() -> None:
    """Import the modules of Megatron that have to be changed, and change them; each step names the releases that need
    it."""
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
    # "CPU RNG state changed within GPU RNG context", once per parameter: here both are the same state.
    logging.getLogger("megatron.core.tensor_parallel.random").setLevel(logging.ERROR)


def _exists(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def _hide_kernels() -> None:
    """Megatron uses optimizers and norms of Transformer Engine and Apex if it finds them. They run only on devices, and
    some cannot even be imported without one."""
    for package, *extensions in (("transformer_engine",), ("apex", "amp_C")):
        if package not in sys.modules and _is_installed(package):
            for name in (package, *extensions):
                sys.modules[name] = None  # pyright: ignore[reportArgumentType] - to import it is an ImportError


def _is_installed(package: str) -> bool:
    """Whether ``package`` is installed as a distribution; a stand-in on the path is not."""
    try:
        place = importlib.metadata.distribution(package).locate_file("")
    except importlib.metadata.PackageNotFoundError:
        return False
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None and os.path.commonpath([spec.origin, str(place)]) == str(place)


def _keep_sent_tensors() -> None:
    """Up to 0.17 an activation is freed while gloo is still sending it, and losses become NaN."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    post_init = TransformerConfig.__post_init__

    def keep(self):
        post_init(self)
        self.deallocate_pipeline_outputs = False

    TransformerConfig.__post_init__ = keep


def _offload_to_the_host() -> None:
    """``--optimizer-cpu-offload`` (from 0.11 on) asks every tensor whether it is on a GPU.

    All tensors say yes here, including host copies. These would be treated as parameters on the GPU and
    get no gradient, and nothing would be learned. So all that is offloaded counts as on the host.
    """
    if not _exists("megatron.core.optimizer.cpu_offloading.hybrid_optimizer"):
        return
    from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer

    sort_parameters = HybridDeviceOptimizer._get_sub_optimizer_param_groups

    def on_host(self, offload_fraction):
        self.pin_cpu_grads = False  # without a device no memory is pinned
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
"""Modules that import triton without a check, in some release, and are imported by pretrain_gpt.py."""


def import_kernels_without_triton() -> None:
    """0.16, and releases from 0.18 on, import kernels written for triton even if none of them is used.

    A CPU build of torch does not include triton. While those modules are imported, a stand-in takes
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
    """0.12 without Transformer Engine refuses every optimizer step, even one without fp8."""
    if _exists("transformer_engine") or not _exists("megatron.core.fp8_utils"):
        return
    from megatron.core import fp8_utils

    # Not quantize_param_shard, which calls this function: the optimizer has imported that one by name.
    if hasattr(fp8_utils, "_quantize_param_shard_impl"):
        fp8_utils._quantize_param_shard_impl = lambda *args, **kwargs: None


def _route_without_engine() -> None:
    """From 0.13 on the router of experts uses a function of Transformer Engine that is not imported without it."""
    if _exists("megatron.core.transformer.moe.moe_utils"):
        with contextlib.suppress(ImportError):  # an optional package is absent
            vars(importlib.import_module("megatron.core.transformer.moe.moe_utils")).setdefault("te_general_gemm", None)


def norm_parts_of_sequences() -> None:
    """Megatron refuses torch's norms under ``--sequence-parallel``. But they compute the same on a part of a sequence
    as on all of it, and their gradients are then added up like those of other norms."""
    if not _exists("megatron.core.transformer.torch_norm"):
        return
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    original = WrappedTorchNorm.__new__

    def whole(cls, config, *args, **kwargs):
        other = copy.copy(config)
        other.sequence_parallel = False
        made = original(cls, other, *args, **kwargs)
        for parameter in made.parameters():
            vars(parameter)["sequence_parallel"] = config.sequence_parallel
        return made

    WrappedTorchNorm.__new__ = staticmethod(whole)


def _start_managers_without_the_script() -> None:
    """``--ckpt-format torch_dist`` starts a manager of queues as a new process. It would import the training script,
    which it does not need, and fail without kernels and CUDA."""
    prepare = spawn.get_preparation_data

    def without_script(name: str) -> dict:
        data = prepare(name)
        return {key: data[key] for key in data if not (name.startswith("SyncManager") and key.startswith("init_main"))}

    spawn.get_preparation_data = without_script
