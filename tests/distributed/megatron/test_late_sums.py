"""Gradients of norms, which tensor-parallel ranks add up after the last reduce, where whole gradients come and go."""

import random

import pytest
from cases import MODELS, TENSOR
from draw_schedule import prepared, reduced
from msgspec.structs import replace
from parity_service import differences
from strict_cases import findings
from variations import some

from megatron_ext.schedule import user_defined_schedule as schedule_file
from megatron_ext.schedule import validate
from megatron_ext.workload import workload as workload_file
from megatron_ext.workload.optimizer_settings import OptimizerSettings

DELAYS = "publish_delay_ms=8,copy_delay_ms=4,read_delay_ms=4,reduce_delay_ms=3"
DRAWN = [("bf16-offload", 3, "1e-2"), ("bf16-tied", 2, "1.0"), ("fp32", 3, "1.0"), ("fp16", 2, "1.0")]


@pytest.mark.parametrize(("name", "zero_stage", "clip"), some(DRAWN, 1))
def test_a_drawn_schedule_trains_bitwise_like_megatron(workloads, services, tmp_path, name, zero_stage, clip):
    workload = replace(
        workloads[TENSOR, name],
        zero_stage=zero_stage,
        limits=workload_file.Limits(nvme_slots=2),
        optimizer=OptimizerSettings(on_host="offload" in name),
    )
    kinds = ("sharded",) if name == "fp16" else ("sharded", "host")
    schedule = prepared(random.Random(5), workload, tmp_path / "s.json", gradients=kinds)
    assert len({group.gradients for group in schedule.groups}) == len(kinds)
    answer = services(TENSOR).run(
        options=[*MODELS[name], "--clip-grad", clip, "--user-defined-schedule-nvme-path", str(tmp_path)],
        schedule=tmp_path / "s.json",
        environment={"MEGATRON_EXT_FAULTS": DELAYS, "MEGATRON_EXT_DEBUG": "1"},
        iterations=4 if name == "fp16" else 3,
        strict={"seed": 5, "order": "drawn"},
    )
    assert findings(answer) == [] == differences(answer)


@pytest.mark.parametrize("kind", some(["host", "sharded"], 1))
def test_sums_that_are_left_out_are_seen(workloads, services, tmp_path, kind):
    reduced(workloads[TENSOR, "fp32"], 3, tmp_path / "s.json", kind)
    answer = services(TENSOR).run(
        options=MODELS["fp32"],
        schedule=tmp_path / "s.json",
        environment={"MEGATRON_EXT_FAULTS": "no_late_sum=1"},
        iterations=2,
    )
    assert differences(answer)


@pytest.mark.parametrize("kind", some(["sharded", "host"], 1))
def test_gradients_are_those_of_stock_but_for_rounding(workloads, services, tmp_path, kind):
    schedule = reduced(workloads[TENSOR, "fp32"], 2, tmp_path / "s.json", kind)
    whole = replace(schedule, groups=tuple(replace(group, gradients=None) for group in schedule.groups))
    schedule_file.save(tmp_path / "whole.json", validate.validate(whole))
    answer = services(TENSOR).run(
        options=MODELS["fp32"],
        schedule=tmp_path / "s.json",
        reference_schedule=tmp_path / "whole.json",
        iterations=1,
        meddle="gradients",
    )
    assert all(0 < difference < 1e-6 for difference in answer["scheduled"]["gradient_difference"])
