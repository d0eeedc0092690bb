"""Models with experts train bitwise like Megatron: experts are shared by other ranks than all other parameters.

Four ranks hold two halves of the experts. Each expert is sharded among two of them (``experts``), or among two that
are not of one tensor-parallel rank (``experts-tensor``), or lies whole on one (``experts-1f1b``).
"""

import random

import pytest
from cases import EXPERTS
from draw_schedule import prepared
from msgspec.structs import replace
from parity_service import differences

from megatron_ext.workload import workload as workload_file
from megatron_ext.workload.optimizer_settings import OptimizerSettings

DEBUG = {"MEGATRON_EXT_DEBUG": "1"}


def drawn(workload, path, seed: int, zero_stage: int, per_node: int = 4, on_host: bool = False, **how):
    """A drawn schedule, checked and written to ``path``."""
    workload = replace(
        workload,
        zero_stage=zero_stage,
        limits=workload_file.Limits(nvme_slots=2),
        optimizer=OptimizerSettings(on_host=on_host),
        parallel=replace(workload.parallel, gpus_per_node=per_node),
    )
    return prepared(random.Random(seed), workload, path, **how)


CASES = {
    "gathered": ("experts", "experts-fp32", 1, dict(routes=("gpu",), gradients=(None,))),
    "mixed": ("experts", "experts-bf16", 2, dict()),
    "freed": ("experts", "experts-bf16", 3, dict()),
}


@pytest.mark.parametrize("case", CASES)
def test_a_drawn_schedule_trains_experts_bitwise_like_megatron(workloads, services, tmp_path, case):
    layout, name, zero_stage, how = CASES[case]
    schedule = drawn(workloads[layout, name], tmp_path / "s.json", 1, zero_stage, on_host="offload" in name, **how)
    assert len({group.ranks for group in schedule.groups}) == 2, "dense groups and experts"
    answer = services(layout).run(
        options=[*EXPERTS[name], "--user-defined-schedule-nvme-path", str(tmp_path)],
        schedule=tmp_path / "s.json",
        environment=DEBUG | {"MEGATRON_EXT_FAULTS": "publish_delay_ms=8,copy_delay_ms=4,read_delay_ms=4"},
    )
    assert differences(answer) == []
