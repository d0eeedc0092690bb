"""torch.cuda answers for the CPU; tried in a process of its own, beside a Megatron of a few lines."""

import subprocess
import sys

from training import run_warm

MEGATRON = {
    "megatron/core/__init__.py": (
        "import triton\nimport triton.language as tl\n\n\n@triton.jit\ndef kernel(x: tl.constexpr):\n    pass\n"
    ),
    "megatron/core/transformer/__init__.py": "",
    "megatron/core/transformer/transformer_config.py": (
        "class TransformerConfig:\n    deallocate_pipeline_outputs = True\n    def __post_init__(self):\n        "
        "self.checked = True\n"
    ),
    "megatron/core/fp8_utils.py": (  # as 0.12 has it
        "def _quantize_param_shard_impl(*args):\n    raise ValueError('no engine')\n\n\n"
        "def quantize_param_shard(*args):\n    _quantize_param_shard_impl(*args)\n"
    ),
    "megatron/core/transformer/moe/__init__.py": "",
    "megatron/core/transformer/moe/moe_utils.py": (  # as 0.13 to 0.19 have it
        "try:\n    from transformer_engine import te_general_gemm\nexcept ImportError:\n    pass\n\n\n"
        "def route():\n    return te_general_gemm\n"
    ),
    "megatron/legacy/fused_kernels/__init__.py": "def load(args):\n    raise RuntimeError('needs nvcc')\n",
}

PROGRAM = """
import sys, torch
built_for = torch.device("cuda")  # what a build for CUDA says without a driver, too
torch._C._accelerator_getAccelerator = lambda: built_for
from megatron_ext.megatron import cpu_compat
from megatron_ext.runtime.device import has_cuda
assert not torch.cuda.is_available() and not has_cuda()
assert cpu_compat.install() and cpu_compat.install()
assert torch.cuda.is_available() and torch.cuda.device_count() >= 1 and not has_cuda()
here = torch.cuda.current_device()
for device in ("cuda", "cuda:0", here, torch.device("cuda", here)):
    for made in (torch.zeros(2, device=device), torch.ones(2).to(device), torch.empty(2).to(device=device)):
        assert made.device.type == "cpu", device
assert torch.tensor([1.0]).cuda().pin_memory().device.type == "cpu"
assert torch.nn.Linear(2, 2).cuda().weight.device.type == "cpu"
assert torch.zeros(1).type() == "torch.cuda.FloatTensor"
assert torch.zeros(1).bfloat16().type() == "torch.cuda.BFloat16Tensor"
assert torch.zeros(1).type(torch.float64).dtype == torch.float64
with torch.cuda.stream(torch.cuda.Stream()):
    event = torch.cuda.current_stream().record_event()
event.synchronize(); torch.cuda.current_stream().wait_event(event); assert event.query()
weight = torch.ones(2, requires_grad=True); weight.sum().backward(); torch.optim.AdamW([weight]).step()
class Made(torch.autograd.Function):
    forward = staticmethod(lambda ctx, x: x * 2)
    backward = staticmethod(lambda ctx, grad: torch.empty(2, device=torch.cuda.current_device()).copy_(grad))
Made.apply(weight).sum().backward(); assert torch.autograd.grad(Made.apply(weight).sum(), weight)[0].sum() == 2
torch.cuda.synchronize(); assert torch.cuda.memory_allocated() == 0 and torch.cuda.get_device_capability() == (8, 0)
torch.cuda.manual_seed(5); state = torch.cuda.get_rng_state(); first = torch.rand(3, device="cuda")
torch.cuda.set_rng_state(state); assert torch.equal(first, torch.rand(3))
from megatron.core import kernel
from megatron.core.transformer.transformer_config import TransformerConfig
config = TransformerConfig(); config.__post_init__()
assert config.checked and config.deallocate_pipeline_outputs is False
from megatron.core import fp8_utils
from megatron.legacy import fused_kernels
fp8_utils.quantize_param_shard(1, 2); fused_kernels.load(None)
assert "triton" not in sys.modules or sys.modules["triton"].__file__  # none, or the one that torch has brought
from megatron.core.transformer.moe import moe_utils
assert moe_utils.route() is None and torch.ones(2).record_stream(torch.cuda.current_stream()) is None
from multiprocessing import spawn
script_of = lambda process: "init_main_from_path" in spawn.get_preparation_data(process)
assert script_of("Process-1") and not script_of("SyncManager-1")
from typing import override
from megatron_ext.measure import options
from megatron_ext.runtime import machine
from megatron_ext.runtime.device import has_cuda
assert not has_cuda() and not options.Options().uses_cuda()
assert machine.environment("auto")["hardware"]["device"] == "cpu"
assert machine.environment("auto")["software"]["backend"] == "gloo"
print("fine")
"""


def run(program: str, tmp_path) -> subprocess.CompletedProcess:
    for path, text in MEGATRON.items():
        place = tmp_path / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)
    script = tmp_path / "script.py"
    script.write_text(program)
    return run_warm([sys.executable, str(script)], imported="torch")


def test_everything_megatron_asks_of_a_device_is_answered(tmp_path):
    result = run(PROGRAM, tmp_path)
    assert result.stdout == "fine\n", result.stderr[-2000:]


def test_too_late(tmp_path):
    late = "import sys, types\nsys.modules['megatron'] = types.ModuleType('megatron')\n"
    result = run(late + "from megatron_ext.megatron import cpu_compat\ncpu_compat.install()\n", tmp_path)
    assert "must be installed before megatron is imported" in result.stderr


def test_an_unpatched_script_is_run_under_it(tmp_path):
    program = "import sys, torch\nassert __name__ == '__main__' and sys.argv[1:] == ['--x']\n"
    program += (
        "from megatron_ext.runtime.device import has_cuda\nassert not has_cuda()\n"
        "print(torch.zeros(1, device='cuda').device)\n"
    )
    (tmp_path / "script.py").write_text(program)
    command = [sys.executable, "-m", "megatron_ext.megatron.cpu_compat", str(tmp_path / "script.py"), "--x"]
    result = run_warm(command, imported="torch")
    assert result.stdout == "cpu\n", result.stderr[-2000:]
