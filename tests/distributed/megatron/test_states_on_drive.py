"""Optimizer states on a drive: training is that of the same optimizer with its states in memory."""

import json
import os
import random

import pytest
from cases import MODELS
from draw_schedule import prepared, states_on_drive
from msgspec.structs import replace
from parity_service import Died, differences

from megatron_ext.schedule import match, validate
from megatron_ext.schedule import user_defined_schedule as schedule_file
from megatron_ext.schedule.memory_bill import memory_bill
from megatron_ext.workload.optimizer_settings import OptimizerSettings

MODEL = "bf16-offload"


def on_drive(workload, zero_stage: int, path, seed: int, every: int):
    """A drawn schedule whose states rest on the drive, those of every ``every``-th group excepted; and its workload."""
    workload = replace(workload, zero_stage=zero_stage, optimizer=OptimizerSettings(on_host=True))
    schedule = prepared(random.Random(seed), workload, path, routes=("gpu", "cpu"))
    chosen = [index for index in range(len(schedule.groups)) if index % every != every - 1]
    schedule = states_on_drive(schedule, workload, chosen, slots=2 + seed % 2)
    match.match(validate.validate(schedule), workload)
    schedule_file.save(path, schedule)
    return schedule, workload


@pytest.mark.parametrize("zero_stage", [1, 3])
def test_training_is_that_with_states_in_memory(workloads, services, tmp_path, zero_stage):
    schedule, workload = on_drive(workloads["interleaved", MODEL], zero_stage, tmp_path / "s.json", zero_stage, every=3)
    answer = services("interleaved").run(
        options=[
            *MODELS[MODEL],
            *("--metrics-path", str(tmp_path / "unused.json")),  # takes the census
            *("--user-defined-schedule-nvme-path", str(tmp_path)),
        ],
        schedule=tmp_path / "s.json",
        environment={"MEGATRON_EXT_FAULTS": "read_delay_ms=4"},
    )
    assert differences(answer) == []
    assert os.listdir(tmp_path) == ["s.json"]
    held = [iterations[-1]["host_bytes"] for iterations in answer["scheduled"]["census"]]
    for stage, bill in enumerate(memory_bill(schedule, workload)):
        for kind in ("main_parameters", "optimizer_states", "staging_slots"):
            billed, counted = bill.memory.host_bytes.get(kind, 0), max(h[kind] for h in held[2 * stage : 2 * stage + 2])
            # Of the tensors on the drive one NaN each is left.
            assert 0 <= counted - billed <= 4096, (kind, bill, held)


def test_a_checkpoint_of_states_on_the_drive_is_that_of_states_in_memory(workloads, services, tmp_path):
    """Saved by one run, loaded by another whose states rest in memory, and the other way."""
    (tmp_path / "drive").mkdir()
    on_drive(workloads["interleaved", MODEL], 3, tmp_path / "s.json", 5, every=1000)
    schedule = schedule_file.decode(tmp_path / "s.json")
    in_memory = replace(
        schedule, state_slots=None, groups=tuple(replace(group, states_rest=None) for group in schedule.groups)
    )
    schedule_file.save(tmp_path / "memory.json", in_memory)

    def train(name: str, iterations: int, *options) -> dict:
        return services("interleaved").run(
            options=[*MODELS[MODEL], "--user-defined-schedule-nvme-path", str(tmp_path / "drive"), *options],
            schedule=tmp_path / name,
            iterations=iterations,
            reference=False,
        )["scheduled"]

    whole = train("memory.json", 5)
    for first, second in (("s.json", "memory.json"), ("memory.json", "s.json")):
        folder = str(tmp_path / first.partition(".")[0])
        begun = train(first, 2, "--save", folder)
        ended = train(second, 5, "--load", folder)
        assert json.dumps(whole["loss"]) == json.dumps(begun["loss"] + ended["loss"])
        assert whole["parameter_sha256"] == ended["parameter_sha256"]


def test_an_optimizer_on_the_device_is_refused(workloads, services, tmp_path):
    on_drive(workloads["interleaved", MODEL], 1, tmp_path / "s.json", 1, every=3)
    options = [option for option in MODELS[MODEL] if option != "--optimizer-cpu-offload"]
    with pytest.raises(Died, match="train with --optimizer-cpu-offload"):
        services("interleaved").run(
            options=[*options, "--user-defined-schedule-nvme-path", str(tmp_path)], schedule=tmp_path / "s.json"
        )
