"""What would fit where nothing does."""

import pytest

from megatron_ext.cost import hardware_sheet
from megatron_ext.cost.device_reserve import device_reserve, temporary_bytes
from megatron_ext.planner.fit.request import Request, fit_problem_of
from megatron_ext.planner.fit.search_settings import NothingFits
from megatron_ext.planner.fit.what_fits import explained
from megatron_ext.workload.workload import Limits

LARGE = """--num-layers 30 --hidden-size 8192 --num-attention-heads 16 --seq-length 2048 --vocab-size 32000 --bf16
    --untie-embeddings-and-output-weights --micro-batch-size 1 --global-batch-size 32 --zero-stage 3""".split()


def said(hardware: str, need_bytes: int, words=LARGE, **more) -> str:
    """The message if the given setting needs ``need_bytes``."""
    problem = fit_problem_of(Request(hardware=hardware, words=tuple(words), **more))
    return str(explained(problem, NothingFits(problem.space.given, need_bytes, 1000)))


@pytest.mark.parametrize(
    "hardware, gpus, factor",
    [("a100-nvlink", None, None), ("a100-nvlink", 2, 4), ("a100-nvlink", 4, 2), ("a100-rdma", None, 2)],
)
def test_more_gpus_would_fit_where_a_node_has_them_or_a_network_joins_nodes(hardware, gpus, factor):
    text = said(hardware, 1 << 37, world_size=gpus)
    assert text.endswith(f", or {factor} times as many GPUs") if factor else "times as many" not in text


def test_a_device_with_as_much_memory_is_not_one_with_more():
    """Without NVLink the reserve is smaller, which is no other GPU's merit."""
    memory = int(hardware_sheet.load("a100-nvlink").device.memory_bytes.value)
    text = said("a100-nvlink", memory - 1_400_000_000)
    assert "a GPU with more memory (gh200, h100-500w-rdma, h200-nvlink)" in text


@pytest.mark.parametrize("over", [0, 1])
def test_another_device_needs_room_for_all_that_the_bill_does_not_count(over):
    """Gaps between activations, and the communicator of context-parallel ranks."""
    sheet, words = hardware_sheet.load("gh200"), [*LARGE, "--context-parallel-size", "2"]
    problem = fit_problem_of(Request(hardware="a100-rdma", words=tuple(words)))
    setting = problem.space.given
    work = setting.workload(Limits())
    reserve = problem.reserve(setting, work, sheet)
    how = {"layers": 30, "within_layer": temporary_bytes(work), "context_parallel": 2}
    assert reserve > device_reserve(sheet, setting.parallel, activation_bytes=0, **how)
    assert ("gh200" in said("a100-rdma", int(sheet.device.memory_bytes.value) - reserve + over, words)) == (not over)


def test_of_several_nodes_another_device_is_one_with_a_network():
    text = said("h100-rdma", 90_000_000_000, nodes=4)
    assert "h200-rdma" in text and "h200-nvlink" not in text
    assert "h200-nvlink" in said("h100-rdma", 90_000_000_000)
