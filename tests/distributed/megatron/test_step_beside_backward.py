"""The host's step beside the backward: training is that of the step which waits for the gradient norm."""

import random

import pytest
from cases import MODELS
from draw_schedule import draw_schedule, states_on_drive, with_gradients
from msgspec.structs import replace
from parity_service import differences
from variations import some

from megatron_ext.schedule import match, validate
from megatron_ext.schedule import user_defined_schedule as schedule_file
from megatron_ext.schedule.memory_bill import memory_bill
from megatron_ext.workload.optimizer_settings import OptimizerSettings

DELAYS = "step_delay_ms=3,reduce_delay_ms=2,publish_delay_ms=4"

BF16 = MODELS["bf16-offload"]
FP16 = [*MODELS["fp16"], "--optimizer-cpu-offload"]

ENOUGH = 1 << 20  # bytes of copies of states: more than any rank's


def write(workload, zero_stage: int, path, seed: int = 1, kinds=(None,), rollback_bytes: int = ENOUGH):
    """A drawn schedule whose optimizer steps beside the backward; and its workload."""
    workload = replace(workload, zero_stage=zero_stage, optimizer=OptimizerSettings(on_host=True))
    draw = random.Random(seed)
    schedule = with_gradients(draw, draw_schedule(draw, workload), workload, kinds)
    schedule = replace(schedule, rollback_bytes=rollback_bytes)
    match.match(validate.validate(schedule), workload)
    schedule_file.save(path, schedule)
    return schedule, workload


def counts(answer) -> tuple[int, int]:
    """Early steps of all ranks, and those of them that were taken back."""
    taken, taken_back = zip(*answer["scheduled"]["early_steps"])
    return sum(taken), sum(taken_back)


@pytest.mark.parametrize("zero_stage, kinds, clip", [(1, (None,), "1e9"), (3, (None, "sharded", "host"), "1e-4")])
def test_training_is_that_of_the_step_that_waits(workloads, services, tmp_path, zero_stage, kinds, clip):
    """With every iteration clipped, and with none."""
    schedule, workload = write(workloads["interleaved", "bf16-offload"], zero_stage, tmp_path / "s.json", 1, kinds)
    answer = services("interleaved").run(
        options=[*BF16, "--clip-grad", clip, "--metrics-path", str(tmp_path / "unused.json")],
        schedule=tmp_path / "s.json",
        iterations=4,
        environment={"MEGATRON_EXT_FAULTS": DELAYS, "MEGATRON_EXT_DEBUG": "1"},
    )
    assert differences(answer) == []
    taken, taken_back = counts(answer)
    assert taken > 0 and taken_back == (taken if clip == "1e-4" else 0)
    held = [iterations[-1]["host_bytes"] for iterations in answer["scheduled"]["census"]]
    for stage, bill in enumerate(memory_bill(schedule, workload)):
        assert {bill.memory.host_bytes["previous_states"]} == {h["previous_states"] for h in held[2 * stage :][:2]}


def test_steps_of_an_iteration_that_overflows_are_taken_back(workloads, services, tmp_path):
    write(workloads["interleaved", "fp16"], 3, tmp_path / "s.json", 2, (None, "sharded"))
    answer = services("interleaved").run(
        options=[*FP16, "--clip-grad", "1e9"],
        schedule=tmp_path / "s.json",
        iterations=5,
        meddle="overflow",
        environment={"MEGATRON_EXT_FAULTS": DELAYS},
    )
    assert differences(answer) == []
    assert [norm is None for norm in answer["scheduled"]["grad_norm"][0]] == [False, False, True, False, False]
    taken, taken_back = counts(answer)
    assert 0 < taken_back < taken


@pytest.mark.parametrize(
    "zero_stage, seed, clip, meddle, fault",
    some(
        [
            (3, 4, "1e-4", "overflow", ""),
            (1, 5, "1e-4", "overflow", ""),
            (2, 6, "1e-4", "overflow", ""),
            (3, 7, "1e9", "overflow", ""),
            (3, 8, "1e-4", None, ""),  # the scale that overflows at first falls by itself
            (1, 9, "1e9", None, ""),
            (3, 4, "1e-4", "overflow", ",no_rollback=1"),
        ],
        1,
    ),
)
def test_overflow_and_clipping_beside_states_on_the_drive(
    workloads, services, tmp_path, zero_stage, seed, clip, meddle, fault
):
    """Every third iteration overflows, every other is clipped; half of the groups have their states on the drive and
    wait, the others are taken back."""
    kinds = (None, "sharded") if zero_stage > 1 else (None,)
    schedule, workload = write(workloads["interleaved", "fp16"], zero_stage, tmp_path / "s.json", seed, kinds)
    schedule = states_on_drive(schedule, workload, list(range(seed % 2, len(schedule.groups), 2)), slots=2 + seed % 2)
    match.match(validate.validate(schedule), workload)
    schedule_file.save(tmp_path / "s.json", schedule)
    (tmp_path / "drive").mkdir()
    answer = services("interleaved").run(
        options=[*FP16, "--clip-grad", clip, "--user-defined-schedule-nvme-path", str(tmp_path / "drive")],
        schedule=tmp_path / "s.json",
        iterations=7,
        meddle=meddle,
        environment={"MEGATRON_EXT_FAULTS": DELAYS + fault},
    )
    assert bool(differences(answer)) == bool(fault)
    skipped = [norm is None for norm in answer["scheduled"]["grad_norm"][0]]
    taken, taken_back = counts(answer)
    if not fault:
        assert 0 < sum(skipped) < 7 and (skipped == [False, False, True] * 2 + [False] or meddle is None)
        assert taken > 0 and (taken_back == taken or clip == "1e9") and (taken_back > 0 or meddle is None)


@pytest.mark.parametrize("options, meddle", [([*BF16, "--clip-grad", "1e-4"], None), (FP16, "overflow")])
def test_a_step_that_is_not_taken_back_is_seen(workloads, services, tmp_path, options, meddle):
    write(workloads["interleaved", "fp16" if meddle else "bf16-offload"], 1, tmp_path / "s.json")
    answer = services("interleaved").run(
        options=options,
        schedule=tmp_path / "s.json",
        iterations=4 if meddle else 2,
        meddle=meddle,
        environment={"MEGATRON_EXT_FAULTS": "no_rollback=1"},
    )
    assert differences(answer)


def test_what_finds_no_room_waits(workloads, services, tmp_path):
    """With room for one group's states, with others on the drive, and beside parameters that somebody changes."""
    schedule, workload = write(workloads["interleaved", "bf16-offload"], 1, tmp_path / "s.json", 3)
    case = dict(
        options=[*BF16, "--clip-grad", "1e9", "--user-defined-schedule-nvme-path", str(tmp_path)],
        schedule=tmp_path / "s.json",
        iterations=3,
    )
    everything = services("interleaved").run(**case, meddle="told")
    assert differences(everything) == []
    sizes = sorted(group.bytes for group in schedule.groups)
    small = replace(schedule, rollback_bytes=sizes[0] // 2 * 12 // 2 + 4096)
    small = states_on_drive(small, workload, [0], slots=2)
    match.match(validate.validate(small), workload)
    schedule_file.save(tmp_path / "s.json", small)
    little = services("interleaved").run(**case)
    assert differences(little) == []
    assert counts(little)[0] < counts(everything)[0]
