"""Groups that are stepped on the device while the optimizer steps the others on the host.

On the CPU both are torch's AdamW, so that training is also that of the optimizer which steps all of them on the host.
"""

import json
import random

import pytest
from cases import MODELS
from draw_schedule import draw_schedule, states_on_device, states_on_drive, with_gradients, with_step_slots
from host_step_cases import THIRD_OF_FIVE, skipped, train
from msgspec.structs import replace
from parity_service import differences
from variations import some

from megatron_ext.schedule import match, validate
from megatron_ext.schedule import user_defined_schedule as schedule_file
from megatron_ext.schedule.memory_bill import memory_bill
from megatron_ext.workload.optimizer_settings import OptimizerSettings

MODEL = "bf16-offload"
DELAYS = "step_delay_ms=3,reduce_delay_ms=2,publish_delay_ms=4,read_delay_ms=4"


def write(workload, zero_stage: int, folder, seed: int = 1, kinds=(None,), drive: bool = False, cast=None, **more):
    """Schedules of one drawn placement: ``s.json`` with the states of every second group on the device, with ``drive``
    of every fourth on the drive, and ``host.json`` with all in host memory; and the workload. ``cast``: that of
    ``step_slots``, or None."""
    workload = replace(workload, zero_stage=zero_stage, optimizer=OptimizerSettings(on_host=True))
    draw = random.Random(seed)
    schedule = with_gradients(draw, draw_schedule(draw, workload), workload, kinds)
    schedule = replace(schedule, **more)
    schedule = with_step_slots(schedule, workload, 3, cast) if cast else schedule
    numbers = range(len(schedule.groups))
    placed = states_on_drive(schedule, workload, list(numbers[1::4]) if drive else [], slots=2)
    placed = states_on_device(placed, list(numbers[::2]))
    for name, one in (("s.json", placed), ("host.json", schedule)):
        match.match(validate.validate(one), workload)
        schedule_file.save(folder / name, one)
    assert {group.states_rest for group in placed.groups} == {None, "device", *(["nvme"] if drive else [])}
    return placed, workload


def options(folder, *more, model=MODEL) -> list[str]:
    (folder / "drive").mkdir(exist_ok=True)
    given = [*MODELS[model], *(["--optimizer-cpu-offload"] if model == "fp16" else [])]
    return [*given, "--user-defined-schedule-nvme-path", str(folder / "drive"), *more]


@pytest.mark.parametrize(
    "zero_stage, kinds, drive, more",
    some(
        [
            (3, (None, "sharded"), True, {"cast": "device", "rollback_bytes": 1 << 20}),
            (1, (None,), False, {}),
            (2, (None, "sharded", "host"), True, {"cast": "host"}),
        ],
        1,
    ),
)
def test_training_is_that_of_the_reference_and_of_states_in_host_memory(
    workloads, services, tmp_path, zero_stage, kinds, drive, more
):
    """Every iteration is clipped, so that steps during the backward are taken back."""
    schedule, workload = write(workloads["interleaved", MODEL], zero_stage, tmp_path, 3, kinds, drive, **more)
    case = dict(
        options=options(tmp_path, "--clip-grad", "1e-4", "--metrics-path", str(tmp_path / "unused.json")),
        schedule=tmp_path / "s.json",
        environment={"MEGATRON_EXT_FAULTS": DELAYS, "MEGATRON_EXT_DEBUG": "1"},
    )
    answer = services("interleaved").run(**case)
    assert differences(answer) == []
    assert differences(services("interleaved").run(**case, reference_schedule=tmp_path / "host.json")) == []
    census = [iterations[-1] for iterations in answer["scheduled"]["census"]]
    for stage, bill in enumerate(memory_bill(schedule, workload)):
        for where in ("device_bytes", "host_bytes"):
            held = [counted[where] for counted in census[2 * stage : 2 * stage + 2]]
            for kind in ("main_parameters", "optimizer_states", "gradient_shards"):
                billed, counted = getattr(bill.memory, where).get(kind, 0), max(kinds.get(kind, 0) for kinds in held)
                # Of the tensors on the drive one NaN each is left in host memory.
                assert 0 <= counted - billed <= (4096 if where == "host_bytes" else 0), (where, kind, billed, counted)
    assert sum(counted["device_bytes"].get("main_parameters", 0) for counted in census) > 0


@pytest.mark.nightly
@pytest.mark.parametrize(("first", "second"), [("s.json", "host.json"), ("host.json", "s.json")])
def test_a_checkpoint_is_that_of_states_in_host_memory(workloads, services, tmp_path, first, second):
    """Saved by one run and loaded by another whose states rest elsewhere."""
    write(workloads["interleaved", MODEL], 3, tmp_path, 5, drive=True)

    def train(name: str, iterations: int, *more) -> dict:
        case = dict(options=options(tmp_path, *more), schedule=tmp_path / name, iterations=iterations, reference=False)
        return services("interleaved").run(**case)["scheduled"]

    whole = train("host.json", 5)
    folder = str(tmp_path / "checkpoint")
    begun = train(first, 2, "--save", folder)
    ended = train(second, 5, "--load", folder)
    assert json.dumps(whole["loss"]) == json.dumps(begun["loss"] + ended["loss"])
    assert whole["parameter_sha256"] == ended["parameter_sha256"]


@pytest.mark.nightly
@pytest.mark.parametrize("every", [2, 1])
def test_a_fused_optimizer_on_the_device_goes_on_from_a_checkpoint(workloads, services, tmp_path, every):
    """It rounds otherwise than the host's, and counts its steps elsewhere. So a run with another placement is another
    run, which shows that the reference has the placement, too. ``every``: so manieth groups are on the device."""
    schedule, _ = write(workloads["interleaved", MODEL], 3, tmp_path, 5, drive=every == 2)
    if every == 1:
        schedule_file.save(tmp_path / "s.json", states_on_device(schedule, list(range(len(schedule.groups)))))

    def train(iterations: int, *more, **case) -> dict:
        case = dict(options=options(tmp_path, *more), schedule=tmp_path / "s.json", meddle="fused", **case)
        return services("interleaved").run(**case, iterations=iterations)

    whole = train(5)
    assert differences(whole) == []
    assert differences(train(5, reference_schedule=tmp_path / "host.json"))
    folder = str(tmp_path / "checkpoint")
    begun = train(2, "--save", folder, reference=False)["scheduled"]
    ended = train(5, "--load", folder)
    assert differences(ended) == []
    assert json.dumps(whole["scheduled"]["loss"]) == json.dumps(begun["loss"] + ended["scheduled"]["loss"])
    assert whole["scheduled"]["parameter_sha256"] == ended["scheduled"]["parameter_sha256"]


@pytest.mark.nightly
@pytest.mark.parametrize(("first", "second"), [("host.json", "s.json"), ("s.json", "host.json")])
def test_a_fused_optimizer_goes_on_from_states_of_the_host_and_they_from_its_own(
    workloads, services, tmp_path, first, second
):
    """Near a run of one placement: a count of steps that began anew would correct moments that are not new."""
    schedule, _ = write(workloads["interleaved", MODEL], 1, tmp_path, 5)
    schedule_file.save(tmp_path / "s.json", states_on_device(schedule, list(range(len(schedule.groups)))))

    def train(name: str, iterations: int, *more) -> dict:
        case = dict(options=options(tmp_path, *more), schedule=tmp_path / name, meddle="fused", iterations=iterations)
        return services("interleaved").run(**case)

    whole = train("host.json", 5)["scheduled"]["loss"]
    folder = str(tmp_path / "checkpoint")
    begun = train(first, 2, "--save", folder)
    ended = train(second, 5, "--load", folder)
    assert differences(ended) == []
    assert begun["scheduled"]["loss"] + ended["scheduled"]["loss"] == pytest.approx(whole, rel=1e-4)


@pytest.mark.nightly
def test_iterations_that_overflow_are_skipped(workloads, services, tmp_path):
    """Every third iteration; the others are clipped. Groups beside it are stepped during the backward."""
    write(workloads["interleaved", "fp16"], 3, tmp_path, 7, (None, "sharded"), drive=True, rollback_bytes=1 << 20)
    clipped = options(tmp_path, "--clip-grad", "1e-4", model="fp16")
    answer = train(services, clipped, tmp_path / "s.json", iterations=5, meddle="overflow", faults=DELAYS)
    assert differences(answer) == []
    assert skipped(answer) == THIRD_OF_FIVE


def test_a_step_that_is_left_out_is_seen(workloads, services, tmp_path):
    write(workloads["interleaved", MODEL], 1, tmp_path)
    answer = services("interleaved").run(
        options=options(tmp_path),
        schedule=tmp_path / "s.json",
        iterations=2,
        environment={"MEGATRON_EXT_FAULTS": "skip_step=0"},
    )
    assert differences(answer)
