"""A batch that grows in the course of training: steps change between two iterations, and no bit does."""

import random
import shutil

import pytest
from cases import MODELS
from draw_schedule import with_gradients
from msgspec.structs import replace
from parity_service import Died, differences
from plans import made_up_table
from variations import some

from megatron_ext import planner
from megatron_ext.schedule import schedules
from megatron_ext.workload.workload import Limits

OPTIONS = [*MODELS["bf16-tied"], "--global-batch-size", "12"]


def planned(workload, zero_stage: int, path) -> dict:
    """Schedules for 2, 4 and 6 micro-batches in the directory ``path``; gradients come and go from stage 2 on, by
    intervals that 2 micro-batches cut short."""
    workload = replace(workload.with_microbatches(6), zero_stage=zero_stage, ramp=(2, 4))
    largest = max(chunk.bytes for chunk in workload.chunks)
    if zero_stage == 3:
        workload = replace(workload, limits=Limits(whole_parameter_bytes=largest))
    main = with_gradients(random.Random(3), planner.plan(workload, made_up_table()), workload, ("sharded", "host"))
    schedules.save(path, [*planner.plan_ramp(main, workload, made_up_table()), main])
    return schedules.load(path)


@pytest.mark.parametrize("zero_stage", some([3, 1, 2], 1))
def test_a_growing_batch_trains_bitwise_like_megatron(workloads, services, tmp_path, zero_stage):
    found = planned(workloads["interleaved", "bf16-tied"], zero_stage, tmp_path / "s")
    assert list(found) == [2, 4, 6]
    if zero_stage == 3:
        assert any(group.reduce_every > 2 for group in found[6].groups)
    answer = services("interleaved").run(
        options=OPTIONS, schedule=tmp_path / "s", iterations=4, meddle="ramp", environment={"MEGATRON_EXT_DEBUG": "1"}
    )
    assert answer["scheduled"]["microbatches"] == [2, 4, 6, 6]
    assert differences(answer) == []


def test_a_number_without_a_schedule_is_refused_before_the_first_step(workloads, services, tmp_path):
    planned(workloads["interleaved", "bf16-tied"], 1, tmp_path / "s")
    (tmp_path / "s" / "4.json").unlink()
    with pytest.raises(Died, match=r"num_microbatches = 4: there are schedules only for 2, 6"):
        services("interleaved").run(options=OPTIONS, schedule=tmp_path / "s", meddle="ramp", reference=False)
    shutil.rmtree(tmp_path / "s")
