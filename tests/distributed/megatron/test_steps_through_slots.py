"""Gradients reach the host's optimizer, and parameters leave it, by slots: training is that without slots."""

import random

import pytest
from draw_schedule import draw_schedule, states_on_drive, with_gradients, with_step_slots
from host_step_cases import BF16, DELAYS, FP16, THIRD_OF_FIVE, early_steps, save, skipped, train
from msgspec.structs import replace
from parity_service import differences
from variations import some

from megatron_ext.planner.reroute import by_cpu_shard, with_host_shards
from megatron_ext.schedule import user_defined_schedule as schedule_file
from megatron_ext.schedule.memory_bill import memory_bill
from megatron_ext.workload.optimizer_settings import OptimizerSettings


def write(workload, zero_stage: int, path, seed: int, kinds=(None,), hosted=False, drive_every=0, early=True, **slots):
    """A drawn schedule whose optimizer steps through slots, and its workload.

    Args:
        hosted: shards rest in host memory.
        drive_every: of so many groups one has its states on the drive.
        early: steps are made during the backward.
        slots: arguments of ``with_step_slots``.
    """
    workload = replace(workload, zero_stage=zero_stage, optimizer=OptimizerSettings(on_host=True))
    draw = random.Random(seed)
    schedule = draw_schedule(draw, workload)
    if hosted:
        schedule = with_host_shards(by_cpu_shard(schedule), workload)
    schedule = with_gradients(draw, schedule, workload, kinds)
    if drive_every:
        schedule = states_on_drive(schedule, workload, list(range(0, len(schedule.groups), drive_every)), slots=2)
    schedule = replace(schedule, rollback_bytes=1 << 20 if early else None)
    schedule = with_step_slots(schedule, workload, **slots)
    save(path, schedule, workload)
    return schedule, workload


def check_census(answer, schedule, workload) -> None:
    """What the slots take, and that nobody keeps a copy of all gradients, is as billed."""
    census = [iterations[-1] for iterations in answer["scheduled"]["census"]]
    for stage, bill in enumerate(memory_bill(schedule, workload)):
        for rank in census[2 * stage : 2 * stage + 2]:
            for where, kind in (("host", "staging_slots"), ("host", "gradients"), ("device", "buffers")):
                billed = getattr(bill.memory, f"{where}_bytes").get(kind, 0)
                assert rank[f"{where}_bytes"].get(kind, 0) == billed, (kind, bill, rank)
        main = bill.memory.host_bytes["main_parameters"]
        assert main == max(rank["host_bytes"]["main_parameters"] for rank in census[2 * stage : 2 * stage + 2])


@pytest.mark.parametrize(
    ("cast", "zero_stage", "kinds", "how", "clip"),
    some(
        [
            ("host", 3, (None, "sharded", "host"), {}, "1e-4"),
            ("device", 1, (None,), {"early": False}, "1e-4"),
            ("host", 1, (None,), {"early": False, "gradients": 2.5}, "1e-4"),
            ("device", 3, (None, "sharded", "host"), {}, "1e9"),
            ("device", 3, (None, "sharded", "host"), {"hosted": True}, "1e-4"),
            ("host", 3, ("host",), {"hosted": True, "early": False, "slots": 3}, "1e9"),
            ("host", 2, ("sharded",), {"gradients": 100.0}, "1e9"),
        ],
        1,
    ),
)
def test_training_is_that_without_slots(workloads, services, tmp_path, cast, zero_stage, kinds, how, clip):
    """With every iteration clipped, and with none; during the backward, and at its end."""
    how = {"slots": 2, "cast": cast} | how
    schedule, workload = write(
        workloads["interleaved", "bf16-offload"], zero_stage, tmp_path / "s.json", 11, kinds, **how
    )
    options = [*BF16, "--clip-grad", clip, "--metrics-path", str(tmp_path / "unused.json")]
    answer = train(services, options, tmp_path / "s.json", debug=True)
    assert differences(answer) == []
    check_census(answer, schedule, workload)
    if how.get("early", True):
        taken, taken_back = early_steps(answer)
        assert taken > 0 and taken_back == (taken if clip == "1e-4" else 0)


@pytest.mark.parametrize(
    ("cast", "zero_stage", "clip", "fault"),
    some(
        [
            ("device", 3, "1e-4", ""),
            ("device", 3, "1e-4", ",no_rollback=1"),
            ("host", 1, "1e-4", ""),
            ("host", 2, "1e9", ""),
            ("host", 1, "1e-4", ",no_rollback=1"),
        ],
        1,
    ),
)
def test_overflow_and_clipping_beside_states_on_the_drive(workloads, services, tmp_path, cast, zero_stage, clip, fault):
    """Every third iteration overflows. Slots hold one large gradient, so groups are several units. The control does not
    take back what does not stand."""
    kinds = (None, "sharded") if zero_stage > 1 else (None,)
    schedule, _ = write(
        *(workloads["interleaved", "fp16"], zero_stage, tmp_path / "s.json", 12, kinds),
        **dict(drive_every=3, slots=3, cast=cast),
    )
    assert schedule.step_slots is not None and schedule.state_slots is not None
    (tmp_path / "drive").mkdir()
    options = [*FP16, "--clip-grad", clip, "--user-defined-schedule-nvme-path", str(tmp_path / "drive")]
    answer = train(services, options, tmp_path / "s.json", iterations=5, meddle="overflow", faults=DELAYS + fault)
    assert bool(differences(answer)) == bool(fault)
    if not fault:
        assert skipped(answer) == THIRD_OF_FIVE
        taken, taken_back = early_steps(answer)
        assert taken > 0 and taken_back > 0 and (taken_back == taken or clip == "1e9")


@pytest.mark.nightly
def test_a_checkpoint_is_that_without_slots(workloads, services, tmp_path):
    """Saved by one run, loaded by another without slots, and the other way."""
    schedule, _ = write(
        workloads["interleaved", "bf16-offload"], 3, tmp_path / "slots.json", 13, slots=2, cast="device"
    )
    schedule_file.save(tmp_path / "without.json", replace(schedule, step_slots=None, rollback_bytes=None))

    def trained(name: str, iterations: int, *options) -> dict:
        case = dict(options=[*BF16, *options], schedule=tmp_path / name, iterations=iterations, reference=False)
        return services("interleaved").run(**case)["scheduled"]

    whole = trained("without.json", 4)
    for first, second in (("slots.json", "without.json"), ("without.json", "slots.json")):
        folder = str(tmp_path / first.partition(".")[0])
        begun = trained(first, 2, "--save", folder)
        ended = trained(second, 4, "--load", folder)
        assert whole["loss"] == begun["loss"] + ended["loss"]
        assert whole["parameter_sha256"] == ended["parameter_sha256"]
