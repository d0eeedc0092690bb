"""The delayed parameter update: training is that of the same rule in plain Megatron, one after another."""

import json
import random
import sys

import pytest
from cases import MODELS
from draw_schedule import draw_schedule, states_on_drive, with_gradients
from msgspec.structs import replace
from parity_service import differences
from places import HELPERS
from training import run_warm
from variations import some

from megatron_ext.schedule import match, validate
from megatron_ext.schedule import user_defined_schedule as schedule_file
from megatron_ext.schedule.memory_bill import memory_bill
from megatron_ext.workload.optimizer_settings import OptimizerSettings

DELAYS = "step_delay_ms=5,reduce_delay_ms=2,publish_delay_ms=4,copy_delay_ms=2"

BF16 = [*MODELS["bf16-offload"], "--delayed-parameter-update"]
FP16 = [*MODELS["fp16"], "--optimizer-cpu-offload", "--delayed-parameter-update"]


def write(workload, zero_stage: int, path, seed: int = 1, kinds=(None,), every: int | None = None):
    """``every``: all states rest on the drive but those of every so many groups; None: none does."""
    workload = replace(workload, zero_stage=zero_stage, optimizer=OptimizerSettings(on_host=True))
    draw = random.Random(seed)
    schedule = with_gradients(draw, draw_schedule(draw, workload), workload, kinds)
    chosen = [index for index in range(len(schedule.groups)) if every is not None and index % every != every - 1]
    schedule = states_on_drive(schedule, workload, chosen, slots=2)
    workload = replace(workload, optimizer=OptimizerSettings(on_host=True, delayed=True))
    match.match(validate.validate(schedule), workload)
    schedule_file.save(path, schedule)
    return schedule, workload


def drive(tmp_path) -> list[str]:
    (tmp_path / "drive").mkdir(exist_ok=True)
    return ["--user-defined-schedule-nvme-path", str(tmp_path / "drive")]


@pytest.mark.parametrize(
    "layout, zero_stage, kinds, every, options",
    some(
        [
            ("interleaved", 3, (None, "sharded", "host"), 3, ["0", "--clip-grad", "1e-2", "--eval-interval", "3"]),
            ("interleaved", 1, (None,), None, ["1", "--clip-grad", "1e9"]),
            ("no_pipeline", 3, (None,), 2, ["2"]),
        ],
        1,
    ),
)
def test_training_is_that_of_the_rule(workloads, services, tmp_path, layout, zero_stage, kinds, every, options):
    """With an evaluation in between, with every iteration clipped, with four replicas, with states on the drive."""
    schedule, workload = write(workloads[layout, "bf16-offload"], zero_stage, tmp_path / "s.json", 1, kinds, every)
    answer = services(layout).run(
        options=[*BF16, *options, *drive(tmp_path), "--metrics-path", str(tmp_path / "unused.json")],
        schedule=tmp_path / "s.json",
        iterations=5,
        environment={"MEGATRON_EXT_FAULTS": DELAYS, "MEGATRON_EXT_DEBUG": "1"},
    )
    assert differences(answer) == []
    dp = workload.parallel.dp
    held = [iterations[-1]["host_bytes"] for iterations in answer["scheduled"]["census"]]
    for stage, bill in enumerate(memory_bill(schedule, workload)):
        for kind in ("gradients", "staging_slots"):
            billed = bill.memory.host_bytes.get(kind, 0)
            assert billed == max(ranks.get(kind, 0) for ranks in held[dp * stage :][:dp]), (kind, bill, held)


def test_training_is_that_of_a_loop_of_plain_pytorch(megatron_tree, tmp_path):
    """In one process: the update of the first iteration is applied at once, the others one iteration later."""
    program = [sys.executable, str(HELPERS / "plain_delay.py"), str(tmp_path), "1"]
    result = run_warm(program)
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert found["scheduled"] == found["plain"]


@pytest.mark.nightly
def test_an_iteration_that_overflows_hands_nothing_over(workloads, services, tmp_path):
    """The update of the iteration before is applied all the same."""
    write(workloads["interleaved", "fp16"], 3, tmp_path / "s.json", 2, (None, "sharded"), every=2)
    answer = services("interleaved").run(
        options=[*FP16, "0", *drive(tmp_path)],
        schedule=tmp_path / "s.json",
        iterations=5,
        meddle="overflow",
        environment={"MEGATRON_EXT_FAULTS": DELAYS},
    )
    assert differences(answer) == []
    skipped = [norm is None for norm in answer["scheduled"]["grad_norm"][0]]
    assert skipped == [False, False, True, False, False]


@pytest.mark.parametrize("fault", some(["lose_update=3", "undelayed=1"], 1))
def test_an_update_at_once_and_one_that_is_lost_are_seen(workloads, services, tmp_path, fault):
    write(workloads["interleaved", "bf16-offload"], 3, tmp_path / "s.json")
    answer = services("interleaved").run(
        options=[*BF16, "0"], schedule=tmp_path / "s.json", environment={"MEGATRON_EXT_FAULTS": fault}
    )
    assert "parameter_sha256" in differences(answer)


@pytest.mark.nightly
def test_changed_parameters_and_a_loaded_checkpoint(workloads, services, tmp_path):
    """Both find every update applied."""
    write(workloads["interleaved", "bf16-offload"], 3, tmp_path / "s.json", 3, every=3)

    def train(iterations: int, folder: str, *more: str, **how) -> dict:
        options = [*BF16, "1", "--save", str(tmp_path / folder), "--save-interval", "2", *drive(tmp_path), *more]
        return services("interleaved").run(options=options, schedule=tmp_path / "s.json", iterations=iterations, **how)

    assert differences(train(3, "changed", meddle="told")) == []
    whole = train(6, "whole", reference=False)["scheduled"]
    first = train(4, "parts", reference=False)["scheduled"]
    second = train(6, "parts", "--load", str(tmp_path / "parts"), reference=False)["scheduled"]
    assert whole["loss"] == first["loss"] + second["loss"]
    assert whole["parameter_sha256"] == second["parameter_sha256"]


@pytest.mark.nightly
def test_changed_parameters_stay_until_an_update_is_applied(workloads, services, tmp_path):
    """No update is, in the iteration behind the change: what is published comes from the shards."""
    schedule, _ = write(workloads["interleaved", "bf16-offload"], 3, tmp_path / "s.json", 3)
    assert any("cpu" in entry.to for entry in schedule.publish)
    case = dict(options=[*BF16, "0"], schedule=tmp_path / "s.json", iterations=4)
    assert differences(services("interleaved").run(**case, meddle="told")) == []


@pytest.mark.nightly
@pytest.mark.parametrize("zero_stage", [3, 1])
def test_an_evaluation_finds_every_update_applied_where_the_script_asks_for_none(
    workloads, services, tmp_path, zero_stage
):
    """Megatron asks for whole parameters before it evaluates; a script that does not gets the same, with and without
    the schedule."""
    write(workloads["interleaved", "bf16-offload"], zero_stage, tmp_path / "s.json", 3)
    case = dict(options=[*BF16, "0"], schedule=tmp_path / "s.json", iterations=5, meddle="evaluate")
    answer = services("interleaved").run(**case)
    assert differences(answer) == [] and answer["scheduled"]["microbatches"] == answer["reference"]["microbatches"]
