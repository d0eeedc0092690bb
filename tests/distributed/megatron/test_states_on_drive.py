"""Optimizer states on a drive: training is that of the same optimizer with its states in memory."""

import json
import os
import re
import socket
import sys

import pytest
from cases import MODELS
from draw_schedule import on_drive
from drive_faults import FAULTS
from failing_run import MODEL, failing_run
from msgspec.structs import replace
from parity_service import Died, differences
from places import HELPERS
from training import run
from variations import some

from megatron_ext.schedule import user_defined_schedule as schedule_file
from megatron_ext.schedule.memory_bill import memory_bill


@pytest.mark.parametrize("zero_stage", some([3, 1], 1))
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


@pytest.mark.parametrize("rollback_bytes", some([0, None], 1))
def test_a_checkpoint_of_states_on_the_drive_is_that_of_states_in_memory(workloads, services, tmp_path, rollback_bytes):
    """Saved by one run, loaded by another whose states rest in memory, and the other way; those on the drive are
    stepped during the backward, or at its end."""
    (tmp_path / "drive").mkdir()
    on_drive(workloads["interleaved", MODEL], 3, tmp_path / "s.json", 5, every=3, rollback_bytes=rollback_bytes)
    schedule = schedule_file.read_unchecked(tmp_path / "s.json")
    groups = tuple(replace(group, states_rest=None) for group in schedule.groups)
    in_memory = replace(schedule, state_slots=None, rollback_bytes=None, groups=groups)
    schedule_file.save(tmp_path / "memory.json", in_memory)

    def train(name: str, iterations: int, *options) -> dict:
        return services("interleaved").run(
            options=[*MODELS[MODEL], "--user-defined-schedule-nvme-path", str(tmp_path / "drive"), *options],
            schedule=tmp_path / name,
            iterations=iterations,
            reference=False,
        )["scheduled"]

    whole = train("memory.json", 5)
    for first, second in some([("s.json", "memory.json"), ("memory.json", "s.json")], 1):
        folder = str(tmp_path / first.partition(".")[0])
        begun = train(first, 2, "--save", folder)
        ended = train(second, 5, "--load", folder)
        assert json.dumps(whole["loss"]) == json.dumps(begun["loss"] + ended["loss"])
        early = [sum(run["early_steps"] and run["early_steps"][0] or (0,)) for run in (begun, ended)]
        assert (max(early) > 0) == (rollback_bytes is not None)
        assert whole["parameter_sha256"] == ended["parameter_sha256"]


def figures(program: str, *words: str) -> dict:
    """What ``program`` of one rank prints. Freed memory goes back to the system."""
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    alone |= {"MALLOC_MMAP_MAX_": "1000000", "MALLOC_MMAP_THRESHOLD_": "32768", "MALLOC_TRIM_THRESHOLD_": "65536"}
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        alone["MASTER_PORT"] = str(one.getsockname()[1])
    done = run([sys.executable, str(HELPERS / program), *words], env=alone)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.nightly
def test_a_run_takes_the_host_memory_that_it_says(megatron_tree, tmp_path):
    """No more, or its first checkpoint would be its end, and no less, or it would be refused for nothing."""
    cases = some(["nvme,device", "memory", "memory,host", "nvme", "nvme,host"], 1)
    for case, found in figures("taken_memory.py", str(tmp_path), *cases).items():
        for run_of_case in (found["anew"], found["loaded"]):
            more = run_of_case["took"] - run_of_case["said"]
            assert -found["whole"] / 3 < more < found["whole"] / 3 + found["comes"], (case, found)


@pytest.mark.nightly
@pytest.mark.parametrize("rest", ["nvme", "memory"])
def test_checkpoints_take_memory_for_one_group(megatron_tree, tmp_path, rest):
    """Those of states in memory are the control: what is loaded is there."""
    found = figures("checkpoint_memory.py", str(tmp_path), rest)
    assert found["equal"] and found["left"] == []
    little = 2 * found["group"] + (8 << 20)
    assert found["saving"] < little < found["states"] / 4
    if rest == "nvme":
        assert found["loading"] < little and found["putting"] < found["slots"] * 4 / 3 + little
    else:
        assert found["loading"] > 0.9 * found["states"]


@pytest.mark.parametrize("rollback_bytes", some([0, None], 1))
@pytest.mark.parametrize("fault", some(["full drive", "read error", "short read", "write error", "short write"], 1))
def test_a_drive_that_fails_ends_every_rank_with_one_line(workloads, tmp_path, fault, rollback_bytes):
    """During the backward, and at its end."""
    on_drive(workloads["two_replicas", MODEL], 3, tmp_path / "s.json", 3, every=1000, rollback_bytes=rollback_bytes)
    failed = failing_run(tmp_path, "1", fault, 2, "--train-iters", "1000")
    assert failed.returncode == 1
    error = rf"states \d+: the file of process \d+ in {tmp_path}/drive {FAULTS[fault][-1]}"
    line = rf"^megatron-ext: rank 1: (the thread .* so the run ends: DriveError: )?{error}$"
    assert re.search(line, failed.stderr, re.M), failed.stderr
    assert "Traceback" not in failed.stderr, failed.stderr
    assert os.listdir(tmp_path / "drive") == [] and not (tmp_path / "metrics.json").exists()


@pytest.mark.parametrize("fault", ["lock", "lock later"])
def test_an_optimizer_whose_memory_one_rank_cannot_lock_is_one_line_on_all(workloads, tmp_path, fault):
    """Of parameters: before the setup Megatron looks for a checkpoint, together: the rank goes there, too. Of copies of
    gradients: Megatron would make them in its first step."""
    on_drive(workloads["two_replicas", MODEL], 3, tmp_path / "s.json", 3, every=1)  # all in memory
    failed = failing_run(tmp_path, "1", fault, 1, "--train-iters", "1")
    refused = (
        r"^.*page-locked memory: rank 1: \d+ bytes of host memory cannot be page-locked \(CUDA error: out of memory\)"
    )
    assert failed.returncode == 2 and re.search(refused, failed.stderr, re.M), failed.stderr
    assert "Traceback" not in failed.stderr


def test_layers_of_one_rank_that_cannot_be_described_are_one_line_on_all(workloads, tmp_path):
    on_drive(workloads["two_replicas", MODEL], 3, tmp_path / "s.json", 3, every=1)
    failed = failing_run(tmp_path, "1", "described", 0, "--train-iters", "1")
    assert failed.returncode == 2 and "megatron-ext: its layers: a stage has no output\n" in failed.stderr, (
        failed.stderr
    )
    assert "Traceback" not in failed.stderr


def test_an_optimizer_on_the_device_is_refused(workloads, services, tmp_path):
    on_drive(workloads["two_replicas", MODEL], 1, tmp_path / "s.json", 1, every=3)
    options = [option for option in MODELS[MODEL] if option != "--optimizer-cpu-offload"]
    with pytest.raises(Died, match="train with --optimizer-cpu-offload"):
        services("two_replicas").run(
            options=[*options, "--user-defined-schedule-nvme-path", str(tmp_path)],
            schedule=tmp_path / "s.json",
            reference=False,
        )
