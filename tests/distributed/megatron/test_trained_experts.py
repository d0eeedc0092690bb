"""Models with experts train bitwise like Megatron: experts are shared by other ranks than all other parameters.

Four ranks hold two halves of the experts. Each expert is sharded among two of them (``experts``), among two that
share nothing else (``experts-tensor``), or lies whole on one (``experts-1f1b``).
"""

import json
import random

import pytest
from cases import EXPERTS
from draw_schedule import draw_schedule, hosted, prepared, reduced, states_on_drive, with_gradients, with_step_slots
from msgspec.structs import replace
from parity_service import differences
from variations import some

from megatron_ext.planner.reroute import by_cpu_shard, with_host_shards
from megatron_ext.schedule import match, validate
from megatron_ext.schedule import user_defined_schedule as schedule_file
from megatron_ext.schedule.memory_bill import memory_bill
from megatron_ext.schedule.user_defined_schedule import Schedule
from megatron_ext.workload import workload as workload_file
from megatron_ext.workload.optimizer_settings import OptimizerSettings

DELAYS = "publish_delay_ms=8,copy_delay_ms=4,read_delay_ms=4,reduce_delay_ms=3"


def sized(workload, zero_stage: int, per_node: int = 4, on_host: bool = False):
    return replace(
        workload,
        zero_stage=zero_stage,
        limits=workload_file.Limits(nvme_slots=2),
        optimizer=OptimizerSettings(on_host=on_host),
        parallel=replace(workload.parallel, gpus_per_node=per_node),
    )


def saved(schedule: Schedule, workload, path) -> Schedule:
    match.match(validate.validate(schedule), workload)
    schedule_file.save(path, schedule)
    return schedule


def experts_of(schedule: Schedule) -> list[int]:
    """Groups of experts, the largest first."""
    groups = schedule.groups
    found = [index for index, group in enumerate(groups) if any(".experts." in name for name in group.parameters)]
    return sorted(found, key=lambda index: -groups[index].bytes)


def run(services, layout: str, name: str, schedule, folder, *options, faults: str = DELAYS, **case) -> dict:
    nodes = ["--gpus-per-node", str(schedule.parallel.gpus_per_node)] if schedule.parallel.gpus_per_node else []
    drive = ["--user-defined-schedule-nvme-path", str(folder)]
    return services(layout).run(
        options=[*EXPERTS[name], *nodes, *drive, *options],
        schedule=folder / "s.json",
        environment={"MEGATRON_EXT_FAULTS": faults, "MEGATRON_EXT_DEBUG": "1"},
        **case,
    )


def check_census(run: dict, schedule: Schedule, workload) -> None:
    """What rests with the ranks throughout, and what gathers go through, is what the bill says."""
    bills = memory_bill(schedule, workload)
    for rank, iterations in enumerate(run["census"]):
        billed = bills[rank * len(bills) // len(run["census"])].memory
        for where, kind in (("device", "shards"), ("device", "buffers"), ("host", "shards")):
            ours, counted = getattr(billed, f"{where}_bytes"), iterations[-1][f"{where}_bytes"]
            assert ours.get(kind, 0) == counted.get(kind, 0), (rank, where, kind)


DRAWN = [
    ("experts", "experts-bf16", 3, 2, ("gpu", "cpu", "nvme")),
    ("experts", "experts-fp32", 1, 4, ("gpu", "cpu")),
    ("experts-1f1b", "experts-bf16", 3, 4, ("gpu", "cpu")),
    ("experts-tensor", "experts-fp32", 3, 4, ("gpu", "cpu", "nvme")),
    ("experts", "experts-bf16", 2, 4, ("gpu", "cpu", "nvme")),
    ("experts-tensor", "experts-bf16", 1, 2, ("gpu", "cpu")),
    ("experts-1f1b", "experts-fp32", 1, 4, ("cpu", "nvme")),
    ("experts", "experts-fp32", 3, 1, ("cpu", "nvme")),
    ("experts-instances", "experts-bf16", 3, 2, ("gpu", "cpu", "nvme")),
    ("experts-instances", "experts-fp32", 1, 4, ("gpu", "cpu")),
]


@pytest.mark.parametrize(("layout", "name", "zero_stage", "per_node", "routes"), some(DRAWN, 1))
def test_a_drawn_schedule_trains_bitwise_like_megatron(
    workloads, services, tmp_path, layout, name, zero_stage, per_node, routes
):
    """With experts on several nodes, too, and with an evaluation in between."""
    workload = sized(workloads[layout, name], zero_stage, per_node)
    schedule = prepared(random.Random(1), workload, tmp_path / "s.json", routes=routes)
    assert len({group.ranks for group in schedule.groups}) == 2, "dense groups and experts"
    published = {route for entry in schedule.publish if entry.group in experts_of(schedule) for route in entry.to}
    assert published == {*routes} - {"gpu"}
    measured = ["--eval-interval", "2", "--eval-iters", "1", "--metrics-path", str(tmp_path / "unused.json")]
    answer = run(services, layout, name, schedule, tmp_path, *measured)
    assert differences(answer) == []
    check_census(answer["scheduled"], schedule, workload)
    assert [entry.name for entry in tmp_path.iterdir()] == ["s.json"]


def write_host_step(workload, path, drive_every: int) -> Schedule:
    """Shards in host memory, from which groups come by ``cpu_shard``, and an optimizer that steps on the host through
    slots and during the backward; of so many groups one has its states on the drive."""
    draw, workload = random.Random(3), sized(workload, 3, on_host=True)
    schedule = with_host_shards(by_cpu_shard(draw_schedule(draw, workload, routes=("gpu",))), workload)
    schedule = with_gradients(draw, schedule, workload, ("sharded", "host"))
    schedule = states_on_drive(schedule, workload, list(range(0, len(schedule.groups), drive_every)), slots=2)
    schedule = replace(schedule, rollback_bytes=1 << 20)
    return saved(with_step_slots(schedule, workload, slots=2, cast="host"), workload, path)


@pytest.mark.parametrize("clip", some(["1e-4", "1e9"], 1))
def test_experts_rest_on_the_host_and_are_stepped_there(workloads, services, tmp_path, clip):
    """The norm by which gradients are clipped is that of dense parameters and experts together."""
    schedule = write_host_step(workloads["experts", "experts-offload"], tmp_path / "s.json", 3)
    experts = {schedule.groups[index] for index in experts_of(schedule)}
    assert {group.shard_rests for group in experts} == {"host"} and len({group.states_rest for group in experts}) == 2
    answer = run(services, "experts", "experts-offload", schedule, tmp_path, "--clip-grad", clip, iterations=4)
    assert differences(answer) == []
    taken, taken_back = map(sum, zip(*answer["scheduled"]["early_steps"]))
    if clip == "1e-4":  # steps of experts without tokens stand: their gradients are zero, whatever they are scaled by
        assert 0.9 * taken < taken_back <= taken
    else:
        assert taken > 0 and taken_back == 0


@pytest.mark.nightly
def test_a_delayed_update_of_experts_is_that_of_the_rule(workloads, services, tmp_path):
    workload = sized(workloads["experts", "experts-offload"], 3)
    workload = replace(workload, optimizer=OptimizerSettings(on_host=True, delayed=True))
    saved(draw_schedule(random.Random(5), workload), workload, tmp_path / "s.json")
    answer = services("experts").run(
        options=[*EXPERTS["experts-offload"], "--delayed-parameter-update", "1"],
        schedule=tmp_path / "s.json",
        iterations=4,
        environment={"MEGATRON_EXT_FAULTS": "step_delay_ms=5,publish_delay_ms=4"},
    )
    assert differences(answer) == []


@pytest.mark.nightly
def test_whoever_reads_between_two_iterations_reads_whole_experts(workloads, services, tmp_path):
    """Ranks that share experts are of several data-parallel groups."""
    workload = sized(workloads["experts-tensor", "experts-fp32"], 3)
    schedule = prepared(random.Random(2), workload, tmp_path / "s.json", routes=("gpu", "cpu"), gradients=(None,))
    answer = run(services, "experts-tensor", "experts-fp32", schedule, tmp_path, meddle="read", faults="")
    assert differences(answer) == []
    for reads in answer["scheduled"]["reads"]:
        assert [read for read, _ in reads] == [true for _, true in reads]


@pytest.mark.parametrize("fault", some(["stale_group", "skip_reduce", "skip_group"], 1))
def test_experts_that_are_not_gathered_published_or_reduced_are_seen(workloads, services, tmp_path, fault):
    workload, path = workloads["experts", "experts-fp32"], tmp_path / "s.json"
    schedule = reduced(workload, 2, path, "sharded") if fault == "skip_reduce" else hosted(workload, 1, path)
    answer = services("experts").run(
        options=EXPERTS["experts-fp32"],
        schedule=path,
        environment={"MEGATRON_EXT_FAULTS": f"{fault}={experts_of(schedule)[0]}"},
        iterations=2,
    )
    assert differences(answer)


@pytest.mark.nightly
def test_a_loaded_checkpoint_goes_on_like_the_run_that_saved_it(workloads, services, tmp_path):
    name = "experts-offload"
    schedule = write_host_step(workloads["experts", name], tmp_path / "s.json", 3)

    def train(iterations: int, *options) -> dict:
        case = dict(iterations=iterations, reference=False, faults="")
        return run(services, "experts", name, schedule, tmp_path, *options, **case)["scheduled"]

    whole = train(4)
    first = train(2, "--save", str(tmp_path / "c"))
    second = train(4, "--load", str(tmp_path / "c"))
    assert json.dumps(whole["loss"]) == json.dumps(first["loss"] + second["loss"])
    assert whole["parameter_sha256"] == second["parameter_sha256"]
