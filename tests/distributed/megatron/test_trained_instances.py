"""Two instances of the optimizer train bitwise like Megatron: shards lie over two of four replicas, and gradients are
added up among all."""

import random

import pytest
from cases import INSTANCES, MODELS
from draw_schedule import prepared
from msgspec.structs import replace
from parity_service import differences
from variations import some

from megatron_ext.formats import moved_bytes
from megatron_ext.formats import trace as traces
from megatron_ext.schedule.byte_bill import byte_bill
from megatron_ext.schedule.memory_bill import memory_bill
from megatron_ext.workload import workload as workload_file
from megatron_ext.workload.optimizer_settings import OptimizerSettings

DELAYS = "publish_delay_ms=8,copy_delay_ms=4,read_delay_ms=4,reduce_delay_ms=3"

DRAWN = [
    ("bf16-offload", 3, 2, ("gpu", "cpu", "nvme")),
    ("bf16-tied", 1, 4, ("gpu", "cpu")),
    ("fp32", 2, 1, ("gpu", "cpu")),
]


@pytest.mark.parametrize(("name", "zero_stage", "per_node", "routes"), some(DRAWN, 1))
def test_a_drawn_schedule_trains_bitwise_like_megatron(
    workloads, services, tmp_path, name, zero_stage, per_node, routes
):
    """With both instances on one node, one on each, and one on two."""
    workload = workloads[INSTANCES, name]
    workload = replace(
        workload,
        zero_stage=zero_stage,
        limits=workload_file.Limits(nvme_slots=2),
        optimizer=OptimizerSettings(on_host="offload" in name),
        parallel=replace(workload.parallel, gpus_per_node=per_node),
    )
    schedule = prepared(random.Random(3), workload, tmp_path / "s.json", routes=routes)
    assert {group.ranks for group in schedule.groups} == {2} and schedule.publish
    answer = services(INSTANCES).run(
        options=[*MODELS[name], "--gpus-per-node", str(per_node), "--metrics-path", str(tmp_path / "unused.json")]
        + ["--user-defined-schedule-nvme-path", str(tmp_path)],
        schedule=tmp_path / "s.json",
        trace=tmp_path / "trace.json",
        environment={"MEGATRON_EXT_FAULTS": DELAYS, "MEGATRON_EXT_DEBUG": "1"},
    )
    assert differences(answer) == []
    counted = traces.load(tmp_path / "trace.json")[1]["moved_bytes"]
    bills = byte_bill(schedule, workload)[0]
    assert [moved_bytes.byte_differences(bills[rank % 2], counted[rank][-1]) for rank in range(4)] == [[]] * 4
    billed = memory_bill(schedule, workload)[0].memory
    for iterations in answer["scheduled"]["census"]:
        assert iterations[-1]["device_bytes"].get("shards", 0) == billed.device_bytes.get("shards", 0)
