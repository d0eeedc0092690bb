"""In an iteration nothing large passes through pageable memory, and no thread of the processor works alone."""

import pytest
from cases import MODELS, STRICT
from msgspec.structs import replace
from parity_service import differences
from placed_schedules import ALL, SHARDS, everything, on_drive, slots
from strict_cases import findings
from variations import some

from megatron_ext.schedule import user_defined_schedule as schedule_file
from megatron_ext.schedule import validate
from megatron_ext.workload.optimizer_settings import OptimizerSettings
from megatron_ext.workload.workload import Limits

MODEL = "bf16-tied"
"""Its norms are sums that the number of threads does not change, other than the backward of torch's layer_norm on the
processor: training is compared with a reference of one thread."""

PROCESSORS = 4
"""Two for each rank: more threads than the machine has processors would wait for each other by spinning."""

LEAST_BYTES = 2048
"""In place of a MB: the model has 240 KB."""


@pytest.fixture
def train(services, workloads, tmp_path):
    def run(make, on_host: bool = False, **dear) -> dict:
        workload = replace(
            workloads[STRICT, MODEL],
            zero_stage=3,
            limits=Limits(nvme_slots=2),
            optimizer=OptimizerSettings(on_host=on_host),
        )
        workload = replace(workload, parallel=replace(workload.parallel, gpus_per_node=2))
        schedule_file.save(tmp_path / "schedule.json", validate.validate(make(workload)))
        options = [*MODELS[MODEL], "--gpus-per-node", "2", "--user-defined-schedule-nvme-path", str(tmp_path)]
        options += ["--optimizer-cpu-offload"] if on_host else []
        dear = dict(processors=PROCESSORS, least_bytes=LEAST_BYTES) | dear
        strict = dict(seed=1, order="late", dear=dear)
        return services(STRICT).run(options=options, schedule=tmp_path / "schedule.json", strict=strict)

    return run


CASES = {
    "slots, cast on the device": dict(make=slots("device", ALL), on_host=True),
    "shards and gradients": dict(make=SHARDS),
    "slots": dict(make=slots("host", SHARDS), on_host=True),
    "states on the drive": dict(make=on_drive(everything(("gpu", "cpu"))), on_host=True),
}


@pytest.mark.parametrize("case", some(list(CASES), 1))
def test_nothing_is_pageable_and_nothing_is_left_to_one_thread(train, case):
    answer = train(**CASES[case])
    assert answer["strict"]["dear"] == []
    assert findings(answer) == [] == differences(answer)
    assert min(answer["strict"]["dear_looked_at"]) > 20


@pytest.mark.nightly
def test_threads_that_nobody_sets_are_seen(train):
    dear = train(**CASES["slots"], set_threads=False)["strict"]["dear"]
    assert any("unit.py" in one and "by one thread" in one for one in dear)
    assert any("gradients.py" in one and "by one thread" in one for one in dear)


def test_parameters_that_leave_from_pageable_memory_are_seen(train):
    """Where the schedule says nothing of the host's step, Megatron makes it as ever."""
    dear = train(ALL, on_host=True)["strict"]["dear"]
    assert dear and all("hybrid_optimizer.py" in one and "pageable memory" in one for one in dear)
