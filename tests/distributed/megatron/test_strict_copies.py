"""In an iteration nothing large passes through pageable memory, and no thread of the processor works alone."""

import pytest
from cases import MODELS, STRICT
from msgspec.structs import replace
from parity_service import differences
from placed_schedules import ALL, SHARDS, on_drive, slots
from strict_cases import findings

from megatron_ext.schedule import user_defined_schedule as schedule_file
from megatron_ext.schedule import validate
from megatron_ext.workload.optimizer_settings import OptimizerSettings
from megatron_ext.workload.workload import Limits

PROCESSORS = 8

LEAST_BYTES = 2048
"""In place of a MB: the model has 240 KB."""


@pytest.fixture
def train(services, workloads, tmp_path):
    def run(name: str, make, on_host: bool = False, **dear) -> dict:
        workload = replace(
            workloads[STRICT, name],
            zero_stage=3,
            limits=Limits(nvme_slots=2),
            optimizer=OptimizerSettings(on_host=on_host),
        )
        workload = replace(workload, parallel=replace(workload.parallel, gpus_per_node=2))
        schedule_file.save(tmp_path / "schedule.json", validate.validate(make(workload)))
        options = [*MODELS[name], "--gpus-per-node", "2", "--user-defined-schedule-nvme-path", str(tmp_path)]
        dear = dict(processors=PROCESSORS, least_bytes=LEAST_BYTES) | dear
        strict = dict(seed=1, order="late", dear=dear)
        return services(STRICT).run(options=options, schedule=tmp_path / "schedule.json", strict=strict)

    return run


CASES = {
    "shards and gradients": dict(name="bf16-tied", make=SHARDS),
    "slots": dict(name="bf16-offload", make=slots("host", SHARDS), on_host=True),
    "slots, cast on the device": dict(name="bf16-offload", make=slots("device", ALL), on_host=True),
    "states on the drive": dict(name="bf16-offload", make=on_drive(ALL), on_host=True),
}


@pytest.mark.parametrize("case", CASES)
def test_nothing_is_pageable_and_nothing_is_left_to_one_thread(train, case):
    answer = train(**CASES[case])
    assert answer["strict"]["dear"] == []
    assert findings(answer) == [] == differences(answer)
    assert min(answer["strict"]["dear_looked_at"]) > 20


def test_threads_that_nobody_sets_are_seen(train):
    dear = train(**CASES["slots"], set_threads=False)["strict"]["dear"]
    assert any("room.py" in one and "by one thread" in one for one in dear)
    assert any("gradients.py" in one and "by one thread" in one for one in dear)
