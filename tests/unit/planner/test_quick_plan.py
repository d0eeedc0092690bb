"""Quick plans beside whole ones: none is faster, and few micro-batches say what many take."""

import pytest
from msgspec.structs import replace

from megatron_ext.planner import plan
from megatron_ext.planner.fit.estimate_setting import quick_choice
from megatron_ext.planner.fit.request import Request, fit_problem_of
from megatron_ext.planner.without_plan import stock_bytes
from megatron_ext.workload.workload import Limits

SCRIPT = """--num-layers 4 --hidden-size 1024 --num-attention-heads 16 --seq-length 2048 --vocab-size 32000 --bf16
--micro-batch-size 1 --optimizer-cpu-offload --optimizer-offload-fraction 1.0 --use-precision-aware-optimizer"""


def times_us(sheet: str, ranks: int, visits: int, zero_stage: int, part: float) -> tuple[float, float]:
    """Of the whole plan and the quick one, within a part of stock's bytes; the optimizer is on the host."""
    words = *SCRIPT.split(), "--global-batch-size", str(ranks * visits)
    problem = fit_problem_of(Request(hardware=sheet, world_size=ranks, words=words))
    setting = problem.space.given._replace(zero_stage=zero_stage)
    work = setting.workload(Limits())
    work = replace(work, limits=Limits(device_bytes=int(part * stock_bytes(work)[0])))
    table = problem.costs.of(setting, work)
    planned = plan(work, table).predicted
    assert planned is not None
    return planned.iteration_time_us, quick_choice(setting, work, table, 1.0).us


@pytest.mark.parametrize("zero_stage, part", [(1, 1.1), (2, 0.9)])
def test_no_plan_is_slower_than_a_quick_one_once_it_is_decided_where_states_rest(zero_stage, part):
    ours, quick = times_us("h100-500w-rdma", 2, 2, zero_stage, part)
    assert ours <= quick * (1 + 1e-9)


def test_an_estimate_by_few_rounds_knows_a_limit_that_only_many_reach():
    """The training thread's launches, which the host's step hides in few rounds."""
    ours, quick = times_us("h200-one-gpu", 1, 12, 2, 0.9)
    assert quick == pytest.approx(ours, rel=0.02)
