"""Make torch.cuda work on the CPU: devices, streams, memory, random numbers, and tensors that report a CUDA device."""

# Functions of torch are replaced here on purpose.
# pyright: reportAttributeAccessIssue=false

import contextlib
import os
import types

import torch
from torch.overrides import TorchFunctionMode


def install() -> None:
    """Replace these functions of torch, until the process ends."""
    _compile_nothing()
    _replace_cuda_functions()
    _replace_tensor_methods()
    _OnCpu().__enter__()
    _stay_on_cpu_in_backward()


def _to_cpu(device):
    """The CPU if ``device`` is a CUDA device in any form that torch accepts, otherwise ``device``."""
    if isinstance(device, int) and not isinstance(device, bool):
        return "cpu"
    if isinstance(device, torch.device) and device.type == "cuda":
        return torch.device("cpu")
    return "cpu" if isinstance(device, str) and device.split(":")[0] == "cuda" else device


class _OnCpu(TorchFunctionMode):
    """Replaces a CUDA device by the CPU in the arguments of every torch function, and page-locks nothing."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if "device" in kwargs:
            kwargs = kwargs | {"device": _to_cpu(kwargs["device"])}
        if "pin_memory" in kwargs:  # torch refuses it without a device
            kwargs = {name: value for name, value in kwargs.items() if name != "pin_memory"}
        # Tensor.to takes the device by position; an integer there is a device as well.
        if function is torch.device and args:  # torch.device(0)
            args = (_to_cpu(args[0]), *args[1:])
        if function is torch.Tensor.to and len(args) > 1:
            args = (args[0], _to_cpu(args[1]), *args[2:])
        return function(*args, **kwargs)


def _stay_on_cpu_in_backward() -> None:
    """Keep the mode on in backward: torch takes it off there, but functions that backward calls also make tensors."""
    run_backward = getattr(torch.autograd.graph, "_engine_run_backward", None)
    if run_backward is None:  # this release of torch calls backward in another way
        return

    def run_backward_on_cpu(*args, **kwargs):
        with _OnCpu():
            return run_backward(*args, **kwargs)

    setattr(torch.autograd, "_engine_run_backward", run_backward_on_cpu)  # noqa: B010 - not in its types


class _Stream:
    """A stream or an event of the CPU, on which all issued work is already done."""

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
    """Turn ``torch.compile`` off: compiling Megatron's small functions takes longer than running them.

    Importing the compiler takes longer than importing Megatron, and ``torch.compile`` always imports it.
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
        # One function for each name: torch.compile's tables treat a function that occurs twice as an error.
        setattr(cuda, name, lambda *args, **kwargs: None)
    for name in "memory_allocated max_memory_allocated memory_reserved max_memory_reserved".split():
        setattr(cuda, name, lambda device=None: 0)
    # A CUDA build of torch without a driver would now believe that there is a device, and fail when it asks for it.
    torch.accelerator.current_accelerator = lambda check_available=False: None
    torch.accelerator.is_available = lambda: False
    cuda.is_available = cuda.is_initialized = lambda: True
    cuda.is_available.of_the_processor = True
    # Megatron silently skips its own set-up if this is 0.
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
    for module in (cuda.memory, cuda.random):  # these modules have imported it by name
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
        # Under a function mode torch looks the method up again by name and calls this function.
        if isinstance(found, str) and not found.startswith("torch.cuda."):
            found = found.replace("torch.", "torch.cuda.", 1)
        return found

    torch.Tensor.type = type_of
