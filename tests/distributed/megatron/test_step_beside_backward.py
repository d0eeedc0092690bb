"""The host's step during the backward: training is that of the step which waits for the gradient norm."""

import random

import pytest
from draw_schedule import draw_schedule, states_on_drive, with_gradients
from host_step_cases import BF16, DELAYS, FP16, THIRD_OF_FIVE, early_steps, save, skipped, train
from msgspec.structs import replace
from parity_service import differences
from variations import some

from megatron_ext.schedule import user_defined_schedule as schedule_file
from megatron_ext.schedule.memory_bill import memory_bill
from megatron_ext.workload.optimizer_settings import OptimizerSettings

ENOUGH = 1 << 20  # bytes of copies of states: more than any rank's


def write(workload, zero_stage: int, path, seed: int = 1, kinds=(None,), rollback_bytes: int = ENOUGH):
    """A drawn schedule whose optimizer steps during the backward; and its workload."""
    workload = replace(workload, zero_stage=zero_stage, optimizer=OptimizerSettings(on_host=True))
    draw = random.Random(seed)
    schedule = with_gradients(draw, draw_schedule(draw, workload), workload, kinds)
    schedule = replace(schedule, rollback_bytes=rollback_bytes)
    save(path, schedule, workload)
    return schedule, workload


@pytest.mark.parametrize(
    "zero_stage, kinds, clip", some([(3, (None, "sharded", "host"), "1e-4"), (1, (None,), "1e9")], 1)
)
def test_training_is_that_of_the_step_that_waits(workloads, services, tmp_path, zero_stage, kinds, clip):
    """With every iteration clipped, and with none."""
    schedule, workload = write(workloads["interleaved", "bf16-offload"], zero_stage, tmp_path / "s.json", 1, kinds)
    options = [*BF16, "--clip-grad", clip, "--metrics-path", str(tmp_path / "unused.json")]
    answer = train(services, options, tmp_path / "s.json", debug=True)
    assert differences(answer) == []
    taken, taken_back = early_steps(answer)
    assert taken > 0 and taken_back == (taken if clip == "1e-4" else 0)
    held = [iterations[-1]["host_bytes"] for iterations in answer["scheduled"]["census"]]
    for stage, bill in enumerate(memory_bill(schedule, workload)):
        assert {bill.memory.host_bytes["previous_states"]} == {h["previous_states"] for h in held[2 * stage :][:2]}


@pytest.mark.nightly
def test_steps_of_an_iteration_that_overflows_are_taken_back(workloads, services, tmp_path):
    write(workloads["interleaved", "fp16"], 3, tmp_path / "s.json", 2, (None, "sharded"))
    answer = train(services, [*FP16, "--clip-grad", "1e9"], tmp_path / "s.json", iterations=5, meddle="overflow")
    assert differences(answer) == []
    assert skipped(answer) == THIRD_OF_FIVE
    taken, taken_back = early_steps(answer)
    assert 0 < taken_back < taken


@pytest.mark.nightly
@pytest.mark.parametrize("zero_stage", [3, 1])
def test_steps_of_an_iteration_that_is_run_again_are_taken_back_before_it_begins(
    workloads, services, tmp_path, zero_stage
):
    """Both plans gather a group at the start that is stepped early: it comes with the parameters of the last step."""
    kinds = (None, "sharded") if zero_stage > 1 else (None,)
    write(workloads["interleaved", "bf16-offload"], zero_stage, tmp_path / "s.json", 12, kinds)
    answer = train(services, [*BF16, "--clip-grad", "1e9"], tmp_path / "s.json", meddle="again")
    assert differences(answer) == []
    taken, taken_back = early_steps(answer)
    assert 0 < taken_back < taken


@pytest.mark.nightly
@pytest.mark.parametrize(
    "zero_stage, seed, clip, meddle, fault, every",
    [
        (3, 4, "1e-4", "overflow", "", 1),
        (1, 5, "1e-4", "overflow", "", 1),
        (2, 6, "1e-4", "overflow", "", 2),
        (3, 7, "1e9", "overflow", "", 1),
        (1, 10, "1e9", "overflow", "", 2),
        (3, 8, "1e-4", None, "", 1),  # the scale that overflows at first falls by itself
        (1, 9, "1e9", None, "", 2),
        (3, 4, "1e-4", "overflow", ",no_rollback=1", 1),
        (1, 4, "1e9", "overflow", ",no_rollback=1", 1),
    ],
)
def test_overflow_and_clipping_with_states_on_the_drive(
    workloads, services, tmp_path, zero_stage, seed, clip, meddle, fault, every
):
    """Every third iteration overflows, every other is clipped; every group, or every other, has its states on the drive
    and none in memory when its step is taken back."""
    kinds = (None, "sharded") if zero_stage > 1 else (None,)
    rollback_bytes = 0 if every == 1 else ENOUGH
    path = tmp_path / "s.json"
    schedule, workload = write(workloads["interleaved", "fp16"], zero_stage, path, seed, kinds, ENOUGH)
    rest_on_drive(schedule, workload, path, every, rollback_bytes, slots=2 + seed % 2)
    (tmp_path / "drive").mkdir()
    options = [*FP16, "--clip-grad", clip, "--user-defined-schedule-nvme-path", str(tmp_path / "drive")]
    answer = train(services, options, path, iterations=5, meddle=meddle, faults=DELAYS + fault)
    assert bool(differences(answer)) == bool(fault)
    taken, taken_back = early_steps(answer)
    if not fault:
        assert 0 < sum(skipped(answer)) < 5 and (skipped(answer) == THIRD_OF_FIVE or meddle is None)
        assert taken > 0 and (taken_back == taken or clip == "1e9") and (taken_back > 0 or meddle is None)


@pytest.mark.parametrize(
    "zero_stage, kinds, clip", some([(3, (None, "sharded", "host"), "1e-4"), (1, (None,), "1e9")], 1)
)
def test_states_on_the_drive_are_stepped_beside_the_backward(workloads, services, tmp_path, zero_stage, kinds, clip):
    """Without memory for any copy. With every iteration clipped, and with none."""
    path = tmp_path / "s.json"
    schedule, workload = write(workloads["interleaved", "bf16-offload"], zero_stage, path, 1, kinds)
    schedule = rest_on_drive(schedule, workload, path, 1, 0, slots=3)
    more = ["--user-defined-schedule-nvme-path", str(tmp_path), "--metrics-path", str(tmp_path / "unused.json")]
    answer = train(services, [*BF16, "--clip-grad", clip, *more], path, debug=True)
    assert differences(answer) == []
    taken, taken_back = early_steps(answer)
    assert taken > 0 and taken_back == (taken if clip == "1e-4" else 0)
    held = [iterations[-1]["host_bytes"] for iterations in answer["scheduled"]["census"]]
    for stage, bill in enumerate(memory_bill(schedule, workload)):
        counted = max(h["staging_slots"] for h in held[2 * stage :][:2])
        assert 0 <= counted - bill.memory.host_bytes["staging_slots"] <= 4096
        assert not any(h.get("previous_states") for h in held)


def rest_on_drive(schedule, workload, path, every: int, rollback_bytes: int, slots: int):
    """The schedule with the states of every ``every``-th group on the drive."""
    schedule = states_on_drive(schedule, workload, list(range(0, len(schedule.groups), every)), slots=slots)
    schedule = replace(schedule, rollback_bytes=rollback_bytes)
    save(path, schedule, workload)
    return schedule


@pytest.mark.parametrize(
    "options, meddle, every",
    some([([*BF16, "--clip-grad", "1e-4"], None, 0), (FP16, "overflow", 1), (FP16, "overflow", 0)], 1),
)
def test_a_step_that_is_not_taken_back_is_seen(workloads, services, tmp_path, options, meddle, every):
    path = tmp_path / "s.json"
    schedule, workload = write(workloads["interleaved", "fp16" if meddle else "bf16-offload"], 1, path)
    if every:
        rest_on_drive(schedule, workload, path, every, 0, slots=3)
    options = [*options, "--user-defined-schedule-nvme-path", str(tmp_path)]
    answer = train(services, options, path, iterations=4 if meddle else 2, meddle=meddle, faults="no_rollback=1")
    assert differences(answer)


@pytest.mark.nightly
def test_what_finds_no_room_waits(workloads, services, tmp_path):
    """With room for one group's states, and beside parameters that somebody changes."""
    schedule, _ = write(workloads["interleaved", "bf16-offload"], 1, tmp_path / "s.json", 3)
    case = dict(options=[*BF16, "--clip-grad", "1e9"], schedule=tmp_path / "s.json", iterations=3)
    everything = services("interleaved").run(**case, meddle="told")
    assert differences(everything) == []
    sizes = sorted(group.bytes for group in schedule.groups)
    small = replace(schedule, rollback_bytes=sizes[0] // 2 * 12 // 2 + 4096)
    schedule_file.save(tmp_path / "s.json", small)
    little = services("interleaved").run(**case)
    assert differences(little) == []
    assert early_steps(little)[0] < early_steps(everything)[0]
