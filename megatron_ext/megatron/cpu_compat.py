"""Train an unmodified Megatron on a machine without a GPU: torch.cuda answers for the CPU.

Megatron-LM asserts a CUDA device, makes its tensors on it and reads its state. None of that
decides what is computed. Where there is no device, :func:`install` lets every such call speak of
the CPU instead, and takes away the three things that cannot work here. It is for tests and for
trying a schedule out: streams and events do nothing, so it says nothing about overlap.

Options that a run needs besides: ``--distributed-backend gloo --transformer-impl local
--no-persist-layer-norm --no-gradient-accumulation-fusion --no-masked-softmax-fusion
--no-bias-gelu-fusion --no-bias-dropout-fusion --no-rope-fusion``.

``megatron-ext run-on-cpu -- pretrain_gpt.py ...`` gives all of them but ``--transformer-impl local``, and runs an
unpatched tree as well.
"""

# Functions of torch and Megatron are replaced here on purpose.
# pyright: reportAttributeAccessIssue=false

import atexit
import contextlib
import importlib
import importlib.metadata
import importlib.util
import logging
import os
import runpy
import sys
import sysconfig
import types
import typing
import unittest.mock
import warnings
from multiprocessing import spawn

import torch
from torch.overrides import TorchFunctionMode

from megatron_ext.cpubench import gloo
from megatron_ext.formats.errors import InputError

_installed = False


def install(*, even_with_a_device: bool = False) -> bool:
    """Let torch.cuda answer for the CPU; call before any module of Megatron is imported.

    Args:
        even_with_a_device: this process uses none, whether or not there is one, and does not look.

    Returns:
        Whether it did anything: not on a machine with a CUDA device.

    Raises:
        InputError: a module of Megatron was imported before.
    """
    global _installed
    if _installed or (not even_with_a_device and torch.cuda.is_available()):
        return _installed
    first = next((name for name in sys.modules if name.split(".")[0] == "megatron"), None)
    if first is not None:
        raise InputError(
            "CPU compatibility must be installed before megatron is imported; "
            "an import above the first hook of the training script brings it in",
            field="module",
            value=first,
        )
    _compile_nothing()
    _build_helpers_for_this_python()
    if not hasattr(typing, "override"):  # Python 3.11; Megatron from 0.18 on imports it
        typing.override = lambda method: method
    _hide_kernels()
    _replace_cuda_functions()
    _replace_tensor_methods()
    _OnCpu().__enter__()  # for as long as the process lives
    _stay_on_cpu_in_backward()
    _replace_in_megatron()
    # "CPU RNG state changed within GPU RNG context", once a parameter: here they are one.
    logging.getLogger("megatron.core.tensor_parallel.random").setLevel(logging.ERROR)
    # Megatron looks at it on purpose, and the warning would name our file.
    warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
    gloo.run_collectives_in_order()
    atexit.register(_leave_process_groups)
    _installed = True
    return True


def is_installed() -> bool:
    """Whether this process trains on the CPU."""
    return _installed


# --- devices ------------------------------------------------------------------------------


def _to_cpu(device):
    """The CPU, if ``device`` is one of CUDA in any of the forms torch takes."""
    if isinstance(device, int) and not isinstance(device, bool):
        return "cpu"
    if isinstance(device, torch.device) and device.type == "cuda":
        return torch.device("cpu")
    return "cpu" if isinstance(device, str) and device.split(":")[0] == "cuda" else device


class _OnCpu(TorchFunctionMode):
    """Every torch function that is handed a CUDA device gets the CPU."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if "device" in kwargs:
            kwargs = kwargs | {"device": _to_cpu(kwargs["device"])}
        # Tensor.to takes the device by position; an integer there is a device as well.
        if function is torch.device and args:  # torch.device(0)
            args = (_to_cpu(args[0]), *args[1:])
        if function is torch.Tensor.to and len(args) > 1:
            args = (args[0], _to_cpu(args[1]), *args[2:])
        return function(*args, **kwargs)


def _stay_on_cpu_in_backward() -> None:
    """torch takes the mode off while it calls backward; what backward calls makes tensors, too."""
    run_backward = getattr(torch.autograd.graph, "_engine_run_backward", None)
    if run_backward is None:  # a torch that calls it otherwise
        return

    def run_backward_on_cpu(*args, **kwargs):
        with _OnCpu():
            return run_backward(*args, **kwargs)

    setattr(torch.autograd, "_engine_run_backward", run_backward_on_cpu)  # noqa: B010 - not in its types


class _Stream:
    """A stream or an event of the CPU: all that was issued is done."""

    cuda_stream = 0
    device = torch.device("cpu")
    query = staticmethod(lambda: True)
    elapsed_time = staticmethod(lambda other: 0.0)

    def __init__(self, *args, **kwargs):
        pass

    def _nothing(self, *args, **kwargs):
        return None

    wait_stream = wait_event = synchronize = record = wait = __exit__ = _nothing

    def record_event(self, event=None):
        """The event, complete from the start."""
        return event or _Stream()

    def __enter__(self):
        return self


_MEMORY_KEYS = tuple(
    f"{kind}.all.{when}"
    for kind in ("allocated_bytes", "reserved_bytes", "active_bytes", "num_alloc_retries", "allocation")
    for when in ("current", "peak", "allocated", "freed")
)


def _compile_nothing() -> None:
    """Compiling the small functions takes longer than running them.

    Importing the compiler takes longer than importing Megatron, and ``torch.compile`` imports it in any case.
    """
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    torch.compile = lambda model=None, **options: (lambda model: model) if model is None else model


def _replace_cuda_functions() -> None:
    cuda, stream = torch.cuda, _Stream()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    properties = types.SimpleNamespace(
        name="cpu", major=8, minor=0, total_memory=memory, multi_processor_count=os.cpu_count()
    )
    for name in (
        "set_device synchronize empty_cache ipc_collect set_stream _lazy_init init "
        "reset_peak_memory_stats reset_max_memory_allocated"
    ).split():
        # One function each: torch.compile's tables take the same function twice for an error.
        setattr(cuda, name, lambda *args, **kwargs: None)
    for name in "memory_allocated max_memory_allocated memory_reserved max_memory_reserved".split():
        setattr(cuda, name, lambda device=None: 0)
    # A build for CUDA without a driver takes torch.cuda's word that there is a device, and fails where it asks for it.
    torch.accelerator.current_accelerator = lambda check_available=False: None
    torch.accelerator.is_available = lambda: False
    cuda.is_available = cuda.is_initialized = lambda: True
    cuda.is_available.of_the_processor = True
    # Megatron skips its own set-up, silently, where this is 0.
    cuda.device_count = lambda: int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    cuda.current_device = lambda: 0
    cuda.memory_stats = lambda device=None: dict.fromkeys(_MEMORY_KEYS, 0)
    cuda.mem_get_info = lambda device=None: (memory, memory)
    cuda.get_device_properties = lambda device=None: properties
    cuda.get_device_name = lambda device=None: properties.name
    cuda.get_device_capability = lambda device=None: (properties.major, properties.minor)
    cuda.is_current_stream_capturing = lambda: False
    cuda.is_bf16_supported = lambda *args, **kwargs: True
    cuda.Stream = cuda.Event = _Stream
    cuda.current_stream = cuda.default_stream = lambda device=None: stream
    cuda.stream = cuda.device = lambda *args, **kwargs: contextlib.nullcontext()
    cuda._lazy_call = lambda callable, **kwargs: callable()
    for module in (cuda.memory, cuda.random):  # they have it by its name
        if hasattr(module, "_lazy_init"):
            module._lazy_init = cuda._lazy_init
    cuda.nvtx.range_push = lambda message: None
    cuda.nvtx.range_pop = lambda: None
    cuda.default_generators = (torch.default_generator,)
    for module in (cuda, cuda.random):
        module.get_rng_state = lambda device=None: torch.get_rng_state()
        module.set_rng_state = lambda state, device=None: torch.set_rng_state(state)
        module.manual_seed = module.manual_seed_all = torch.default_generator.manual_seed
        module.initial_seed = torch.initial_seed


def _replace_tensor_methods() -> None:
    def stay(self, *args, **kwargs):
        return self

    torch.Tensor.cuda = torch.nn.Module.cuda = torch.Tensor.pin_memory = stay
    torch.Tensor.record_stream = lambda self, stream: None
    torch.Tensor.is_cuda = property(lambda self: True)
    name_type = torch.Tensor.type

    def type_of(self, *args, **kwargs):
        # Megatron sorts parameters by the names of the CUDA tensor types.
        found = name_type(self, *args, **kwargs)
        # Under a function mode torch looks the method up again by name and finds this one.
        if isinstance(found, str) and not found.startswith("torch.cuda."):
            found = found.replace("torch.", "torch.cuda.", 1)
        return found

    torch.Tensor.type = type_of


def _leave_process_groups() -> None:
    """gloo's threads that are still there when the process ends abort it now and then, after
    training is done; Megatron does not always take its groups down.

    Not after an error: gloo would wait for ranks that never come, and hold up the launcher."""
    failed = getattr(sys, "last_value", None) is not None
    if torch.distributed.is_initialized() and not failed:
        torch.distributed.destroy_process_group()


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


# --- Megatron -----------------------------------------------------------------------------


def _replace_in_megatron() -> None:
    """What torch cannot answer for; each step names the releases that need it."""
    import_kernels_without_triton()
    _keep_sent_tensors()
    _offload_to_the_host()
    if _exists("megatron.legacy.fused_kernels"):  # up to 0.17: compiles with nvcc
        from megatron.legacy import fused_kernels

        fused_kernels.load = lambda args: None
    _skip_fp8_of_absent_engine()
    _route_without_engine()
    _start_managers_without_the_script()


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


def _start_managers_without_the_script() -> None:
    """``--ckpt-format torch_dist`` starts a manager of queues as a new process, which would import the training script
    and fail: it has no kernels and no CUDA. It has no use for the script."""
    prepare = spawn.get_preparation_data

    def without_script(name: str) -> dict:
        data = prepare(name)
        return {key: data[key] for key in data if not (name.startswith("SyncManager") and key.startswith("init_main"))}

    spawn.get_preparation_data = without_script


def main() -> None:
    """Run a script under CPU compatibility: ``-m megatron_ext.megatron.cpu_compat SCRIPT ...``."""
    if len(sys.argv) < 2:
        sys.exit("usage: python -m megatron_ext.megatron.cpu_compat SCRIPT [OPTION]...")
    del sys.argv[0]
    sys.path.insert(0, os.path.dirname(os.path.abspath(sys.argv[0])))
    # Not this module, which is __main__, but the one that everybody else imports.
    from megatron_ext.cpubench import parser_options
    from megatron_ext.megatron import cpu_compat, one_line_end

    one_line_end.install()
    if cpu_compat.install():
        parser_options.without_a_gpu()
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
