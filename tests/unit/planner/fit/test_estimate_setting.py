"""The time that no plan of a setting can beat."""

import pytest
from msgspec.structs import replace
from parallel_sizes import sized
from planning_cases import line

from megatron_ext.cost import hardware_sheet
from megatron_ext.cost.estimated_table import estimate
from megatron_ext.planner.evaluate import evaluate
from megatron_ext.planner.fit import estimate_setting
from megatron_ext.simulator.timing import Timing
from megatron_ext.workload.gpt_shapes import ExpertShape, GptShape, MicroBatch, gpt_workload


@pytest.mark.parametrize("etp", [1, 4])
def test_the_bound_of_many_steps_is_close_below_an_iteration_that_is_mostly_the_optimizer_s(monkeypatch, etp):
    """Most parameters are experts', which twice or half as many ranks share as share the others."""
    monkeypatch.setattr(estimate_setting, "PROVEN_STEPS", 0)
    experts = ExpertShape(16, 1, 4096, (1, 1))
    shape = GptShape(2, 1024, 4096, 8, 8, 1024, 128, linear_bias=False, qkv_bias=False, tied=False, experts=experts)
    parallel = sized(dp=2, tp=4, ep=2, etp=etp, microbatches=1, gpus_per_node=8)
    batch = MicroBatch(64, 1, sequence_parallel=True)
    work = gpt_workload(shape, parallel, batch)
    assert parallel.expert_dp == 4 / etp
    table = replace(estimate(hardware_sheet.load("h100-nvlink"), work, batch), optimizer=line(20.0, 1e3))
    us = evaluate(work, table).iteration_time_us
    assert 0.8 * us < estimate_setting.bound_us(work, Timing(work, table)) <= us
