"""Steps from the drive during the backward, drawn: what rests where, slots, clipping, overflow, changed parameters."""

import random

import pytest
from cases import MODELS
from draw_schedule import draw_schedule, states_on_drive, with_gradients
from msgspec.structs import replace
from parity_service import differences

from megatron_ext.schedule import match, validate
from megatron_ext.schedule import user_defined_schedule as schedule_file
from megatron_ext.schedule.group_facts import largest_gradient
from megatron_ext.schedule.user_defined_schedule import Schedule, StepSlots
from megatron_ext.workload.optimizer_settings import OptimizerSettings


def drawn(draw: random.Random, workload, kinds) -> Schedule:
    schedule = with_gradients(draw, draw_schedule(draw, workload), workload, kinds)
    share = draw.choice((0.3, 0.7, 1.0))
    chosen = [index for index in range(len(schedule.groups)) if draw.random() < share] or [0]
    schedule = states_on_drive(schedule, workload, chosen, slots=draw.randint(2, 5))
    slots = replace(schedule.state_slots, slot_bytes=schedule.state_slots.slot_bytes * draw.choice((1, 1, 3)))
    in_memory = [largest_gradient(group, workload) for group in schedule.groups if group.states_rest is None]
    if in_memory and draw.random() < 0.5:
        cast = draw.choice(("host", "device"))
        step_slots = StepSlots(slots=draw.randint(2, 3), slot_bytes=max(in_memory), cast=cast)
        schedule = replace(schedule, step_slots=step_slots)
    return replace(schedule, state_slots=slots, rollback_bytes=draw.choice((0, 4096, 1 << 20)))


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(16))
def test_training_is_that_of_the_step_that_waits(workloads, services, tmp_path, seed):
    draw = random.Random(seed)
    fp16, zero_stage = draw.random() < 0.6, draw.choice((1, 2, 3))
    name = "fp16" if fp16 else "bf16-offload"
    workload = replace(workloads["interleaved", name], zero_stage=zero_stage, optimizer=OptimizerSettings(on_host=True))
    schedule = drawn(draw, workload, (None, "sharded") if fp16 else (None, "sharded", "host"))
    match.match(validate.validate(schedule), workload)
    schedule_file.save(tmp_path / "s.json", schedule)
    (tmp_path / "drive").mkdir()
    options = [*MODELS[name], *(["--optimizer-cpu-offload"] if fp16 else [])]
    options += ["--clip-grad", draw.choice(("1e9", "1.0", "1e-4"))]
    options += ["--user-defined-schedule-nvme-path", str(tmp_path / "drive")]
    options += ["--eval-interval", "2", "--eval-iters", "1"] if draw.random() < 0.4 else []
    answer = services("interleaved").run(
        options=options,
        schedule=tmp_path / "s.json",
        iterations=6,
        meddle=draw.choice(("overflow", None) if fp16 else ("told", None)),
        environment={"MEGATRON_EXT_FAULTS": f"step_delay_ms=3,reduce_delay_ms=2,publish_delay_ms=4,seed={seed}"},
    )
    assert differences(answer) == []
