"""Training on a strict stand-in of a CUDA device: everything is ordered, in its memory, and waited for by streams.

``benchmarks/strict_device.py`` does the same with 200 drawn schedules and takes every ordering away in turn.
"""

import contextlib
import ctypes
import itertools
import random
import re
import time

import faults
import orderings
import pytest
from cases import INSTANCES, MODELS, STRICT
from draw_schedule import draw_schedule, states_on_drive, with_own_peak, with_step_slots
from msgspec.structs import replace
from parity_service import Died, differences
from strict_cases import PIPELINE, PIPELINE_EVERY, findings, strict_case, waits
from strict_engine import ONE_QUEUE, Engine
from strict_streams import OFFSET, StreamHandle, driver
from variations import some

from megatron_ext.planner.reroute import by_cpu_shard, rerouted, with_host_shards
from megatron_ext.schedule import user_defined_schedule as schedule_file
from megatron_ext.schedule import validate
from megatron_ext.schedule.memory_bill import copies_of_whole
from megatron_ext.schedule.user_defined_schedule import PublishGroup
from megatron_ext.workload.optimizer_settings import OptimizerSettings


@pytest.fixture
def service(services):
    return services(STRICT)


@pytest.mark.parametrize(("seed", "zero_stage"), some([(0, 3), (1, 1), (4, 2), (2, 3)], 1))
def test_everything_is_ordered_and_in_its_memory(service, workloads, tmp_path, seed, zero_stage):
    case = strict_case(seed, workloads, tmp_path, zero_stage)
    answer = service.run(**case)
    assert findings(answer) == []
    assert differences(answer) == []
    assert waits(case, answer) == []
    assert answer["strict"]["accesses"] > 5000


def test_reduces_within_a_backward_are_behind_the_hooks_that_add(service, workloads, tmp_path):
    """All gradients come and go, so those of all layers but the first are reduced before the backward ends."""
    case = strict_case(2, workloads, tmp_path, 2) | {"meddle": None, "iterations": 2}
    parallel = validate.load(case["schedule"]).parallel
    workload = replace(workloads[STRICT, "fp32"], zero_stage=2, parallel=parallel)
    drawn = (draw_schedule(random.Random(number), workload, ("gpu",)) for number in itertools.count())
    schedule = next(schedule for schedule in drawn if len(schedule.groups) > 2)
    groups = tuple(replace(group, gradients="sharded") for group in schedule.groups)
    schedule_file.save(case["schedule"], validate.validate(replace(schedule, groups=groups)))
    assert findings(service.run(**case, reference=False)) == []


def test_one_hardware_queue_does_not_block_itself(service, workloads, tmp_path):
    """Shards that rest on the host are published by a thread, and read again through the drive."""
    case = strict_case(153, workloads, tmp_path)
    assert case["strict"]["order"] == ONE_QUEUE
    answer = service.run(**case)
    assert findings(answer) == [] == differences(answer) and waits(case, answer) == []


@pytest.mark.parametrize(("order", "moves"), [("early", True), (ONE_QUEUE, False)])
def test_in_one_queue_a_wait_ahead_of_its_store_blocks_it(order, moves):
    """What [Note: Who waits for which flag] in flags.py rules out."""
    engine = Engine(0, 0, order, stuck_seconds=0.3)
    word = ctypes.c_int64(0)
    place = ctypes.addressof(word) + OFFSET
    waiting, storing = StreamHandle(engine), StreamHandle(engine)
    driver(engine, True).cuStreamWaitValue64(waiting.cuda_stream, place, 1, 0)
    driver(engine, True).cuStreamWriteValue64(storing.cuda_stream, place, 1, 0)
    with contextlib.nullcontext() if moves else pytest.raises(RuntimeError, match="does not get on"):
        engine.synchronize(None, "torch.cuda.synchronize")
    engine.close()
    assert word.value == moves


def test_what_passes_between_the_ranks_of_a_pipeline_is_ordered(services, workloads, tmp_path):
    case = strict_case(PIPELINE_EVERY // 2, workloads, tmp_path)
    assert case["layout"] == PIPELINE
    answer = services(PIPELINE).run(**case)
    assert findings(answer) == [] == differences(answer)


@pytest.mark.nightly
def test_steps_that_are_taken_back_are_ordered(service, workloads, tmp_path):
    answer = service.run(**strict_case(29, workloads, tmp_path))
    assert findings(answer) == [] == differences(answer)
    assert min(taken_back for _, taken_back in answer["scheduled"]["early_steps"]) > 0


def drive_case(workloads, folder, zero_stage: int, rollback_bytes: int | None) -> dict:
    """Every third iteration overflows; all states rest on the drive."""
    case = strict_case(29, workloads, folder, zero_stage)
    schedule = validate.load(case["schedule"])
    stage = schedule.zero_stage
    workload = replace(workloads[STRICT, "fp16"], zero_stage=stage, optimizer=OptimizerSettings(on_host=True))
    schedule = states_on_drive(schedule, workload, list(range(len(schedule.groups))), slots=3)
    schedule = replace(schedule, rollback_bytes=rollback_bytes, step_slots=None)
    schedule_file.save(case["schedule"], validate.validate(schedule))
    return case


@pytest.mark.parametrize("zero_stage, rollback_bytes", some([(3, 0), (1, 0), (3, None)], 1))
def test_steps_from_the_drive_are_ordered(service, workloads, tmp_path, zero_stage, rollback_bytes):
    answer = service.run(**drive_case(workloads, tmp_path, zero_stage, rollback_bytes))
    assert findings(answer) == [] == differences(answer)
    if rollback_bytes is not None:
        assert min(taken_back for _, taken_back in answer["scheduled"]["early_steps"]) > 0


@pytest.mark.nightly
def test_host_copies_that_nobody_reads_are_made_before_steps_change_their_shards(service, workloads, tmp_path):
    """Of states on the drive, whose shards rest on the device: nothing of the iteration is behind such a copy."""
    case = drive_case(workloads, tmp_path, 1, 0)
    schedule = rerouted(validate.load(case["schedule"]), lambda action: "gpu")
    publish = tuple(PublishGroup(group=index, to=("cpu",)) for index in range(len(schedule.groups)))
    schedule_file.save(case["schedule"], validate.validate(replace(schedule, publish=publish)))
    answer = service.run(**case)
    assert findings(answer) == [] == differences(answer)


def test_steps_on_the_device_beside_those_of_the_host_are_ordered(service, workloads, tmp_path):
    case = strict_case(99, workloads, tmp_path)
    assert {group.states_rest for group in validate.load(case["schedule"]).groups} == {None, "device"}
    answer = service.run(**case)
    assert findings(answer) == [] == differences(answer)


def test_gathers_wait_for_parameters_that_megatron_copies_to_the_device(service, workloads, tmp_path):
    """The schedule leaves the host's step to Megatron, and gathers from the shards that Megatron writes."""
    workload = replace(workloads[STRICT, "bf16-offload"], optimizer=OptimizerSettings(on_host=True))
    drawn = (draw_schedule(random.Random(number), workload, ("gpu",)) for number in itertools.count())
    schedule = next(schedule for schedule in drawn if schedule.ranks[0].start.unshard)
    schedule_file.save(tmp_path / "schedule.json", validate.validate(schedule))
    case = dict(options=MODELS["bf16-offload"], schedule=tmp_path / "schedule.json", iterations=3)
    answer = service.run(**case, strict={"seed": 1, "order": "late"})
    assert findings(answer) == [] == differences(answer)


def test_reduces_over_instances_are_behind_the_hooks_that_begin_them(services, workloads, tmp_path):
    """Gradients stay whole, so Megatron's hooks begin their reduces, on the stream on which they add and scale."""
    drawn = (draw_schedule(random.Random(n), workloads[INSTANCES, "fp32"], ("gpu",)) for n in itertools.count())
    schedule = next(schedule for schedule in drawn if schedule.ranks[0].start.unshard)
    schedule_file.save(tmp_path / "schedule.json", validate.validate(schedule))
    case = dict(options=MODELS["fp32"], schedule=tmp_path / "schedule.json", iterations=3)
    answer = services(INSTANCES).run(**case, strict={"seed": 1, "order": "late"})
    assert findings(answer) == [] == differences(answer)


SYMMETRIC = 39


def test_copy_engines_gather_in_registered_memory(service, workloads, tmp_path):
    case = strict_case(SYMMETRIC, workloads, tmp_path, 3)
    assert {group.algorithm for group in validate.load(case["schedule"]).groups} == {"symmetric"}
    answer = service.run(**case)
    assert findings(answer) == [] == differences(answer) and waits(case, answer) == []
    assert len(answer["strict"]["symmetric_gathers"][0]) > 10


def test_without_copy_engines_their_schedule_is_refused_at_once(service, workloads, tmp_path):
    case = strict_case(SYMMETRIC, workloads, tmp_path, 3)
    del case["strict"]
    with pytest.raises(Died, match=r"groups\[0\].algorithm = 'symmetric': not possible here: no CUDA device"):
        service.run(**case, reference=False)


def is_seen(service, site: str, make_case) -> bool:
    """Whether a case without the ordering ``site`` is seen to fail, at first by the stand-in alone. On a loaded machine
    the backward may end before a group is stepped beside it, so there are several tries."""
    for compared in (False, True, True):
        case = make_case()
        case["strict"] |= {"off": site, "stuck_seconds": 4}
        try:
            answer = service.run(**case, reference=compared)
        except Died:
            return True
        assert site in answer["strict"]["reached"], "this case does not come by"
        if findings(answer) or (compared and differences(answer)):
            return True
    return False


def ordering(file: str, call: str, number: int = 0) -> str:
    """The site of a call in a file of the runtime, counted from 0."""
    return [site for site in orderings.sites() if site.startswith(f"{file}:") and site.endswith(f" {call}")][number]


def slots_case(workloads, folder, cast: str, early: bool, shards: str = "device") -> dict:
    """Steps of the host's optimizer that are taken back, with gradients and parameters through two slots; shards rest
    where they were drawn, or all of them on the ``host``."""
    case = strict_case(29, workloads, folder, 3)
    schedule, workload = validate.load(case["schedule"]), workloads[STRICT, "fp16"]
    if shards == "host":
        work = replace(workload, zero_stage=3, optimizer=OptimizerSettings(on_host=True))
        schedule = with_host_shards(by_cpu_shard(schedule), work)
        assert {group.shard_rests for group in schedule.groups} == {"host"}
    schedule = with_step_slots(schedule, workload, slots=2, cast=cast)
    schedule = replace(schedule, rollback_bytes=schedule.rollback_bytes if early else None)
    schedule_file.save(case["schedule"], validate.validate(schedule))
    return case


@pytest.mark.parametrize(
    ("cast", "early", "shards"),
    some(
        [
            ("host", True, "device"),
            ("device", False, "host"),
            ("device", True, "device"),
            ("device", True, "host"),
            ("host", False, "device"),
        ],
        1,
    ),
)
def test_what_passes_through_slots_is_ordered(service, workloads, tmp_path, cast, early, shards):
    answer = service.run(**slots_case(workloads, tmp_path, cast, early, shards))
    assert findings(answer) == [] == differences(answer)


@pytest.mark.parametrize(
    ("cast", "early", "site"),
    some(
        [
            ("host", False, ("room.py", "poll", 0)),  # a step before its gradients have arrived
            ("host", False, ("after_norm.py", "record")),  # gradients copied before they are clipped
            ("host", True, ("early.py", "when", 1)),  # parameters that leave before they are made
            ("device", True, ("early.py", "when", 0)),  # a room taken by a second unit
        ],
        1,
    ),
)
def test_an_ordering_of_rooms_that_is_taken_away_is_seen(service, workloads, tmp_path, cast, early, site):
    assert is_seen(service, ordering(*site), lambda: slots_case(workloads, tmp_path, cast, early))


@pytest.mark.nightly
@pytest.mark.parametrize(
    "site", some([("drive_slots.py", "wait"), ("drive_states.py", "_wait", 1), ("drive_slots.py", "wait", 1)], 1)
)
def test_an_ordering_of_states_on_the_drive_that_is_taken_away_is_seen(service, workloads, tmp_path, site):
    """A slot is read into while it is still written."""
    assert is_seen(service, ordering(*site), lambda: drive_case(workloads, tmp_path, 3, 0))


def delayed_case(workloads, folder, on_drive: tuple[int, ...] = ()) -> dict:
    """Two evaluations, and updates that are delayed from the first iteration on; with states of groups ``on_drive``."""
    case = strict_case(19, workloads, folder, 3)
    schedule = replace(validate.load(case["schedule"]), rollback_bytes=None, step_slots=None)
    schedule = states_on_drive(schedule, workloads[STRICT, "bf16-offload"], list(on_drive), slots=2)
    schedule_file.save(case["schedule"], schedule)
    case["options"] += ["--delayed-parameter-update", "0", "--eval-interval", "2", "--eval-iters", "1"]
    return case | {"iterations": 5}


def test_delayed_updates_are_ordered(service, workloads, tmp_path):
    answer = service.run(**delayed_case(workloads, tmp_path, on_drive=(0, 2, 4)))
    assert findings(answer) == [] == differences(answer)


@pytest.mark.nightly
def test_delayed_updates_by_gradients_that_have_not_arrived_are_seen(service, workloads, tmp_path):
    """In CI steps that are not delayed show the same."""
    assert is_seen(service, ordering("room.py", "poll", 0), lambda: delayed_case(workloads, tmp_path))


def test_a_device_without_flags_for_streams_is_refused_at_once(service, workloads, tmp_path):
    case = strict_case(3, workloads, tmp_path, 3)
    case["strict"]["stream_flags"] = False
    with pytest.raises(Died, match=r"s?[0-9]*\.json: publish: needs streams that wait for flags in host memory: this"):
        service.run(**case, reference=False)


@pytest.mark.parametrize(("seed", "locks"), some([(3, 0), (8, 2), (8, 0)], 1))
def test_memory_that_one_rank_cannot_lock_is_one_line_on_all(service, workloads, tmp_path, seed, locks):
    """The driver of the second rank locks so many pieces; no rank is left in a collective."""
    case = strict_case(seed, workloads, tmp_path, 3)
    case["strict"]["locks"] = locks
    assert_one_line(service, case)


@pytest.mark.parametrize("piece", some(["shard, broadcast", "gradient", "shard"], 1))
def test_memory_that_one_rank_cannot_lock_while_its_groups_are_made(service, workloads, tmp_path, piece):
    """Of the second rank's second piece, which lies in host memory: a shard of parameters that never fit whole, a
    gradient, a shard. The first two are refused before the checkpoint is looked for."""
    workload = replace(workloads[STRICT, "bf16-offload"], zero_stage=3, optimizer=OptimizerSettings(on_host=True))
    schedule = draw_schedule(random.Random(0), workload, ("gpu",))
    if piece == "gradient":
        schedule = replace(schedule, groups=tuple(replace(group, gradients="host") for group in schedule.groups))
    else:
        schedule = with_host_shards(by_cpu_shard(schedule), workload)
    if piece == "shard, broadcast":
        schedule = with_own_peak(schedule, workload)
        assert any(copies_of_whole(schedule)) and all(group.shard_rests for group in schedule.groups)
    assert len(schedule.groups) > 2
    schedule_file.save(tmp_path / "schedule.json", validate.validate(schedule))
    options = [*MODELS["bf16-offload"], *([] if piece == "shard" else ["--load", str(tmp_path / "none")])]
    strict = {"seed": 1, "order": "late", "locks": 1}
    assert_one_line(service, dict(options=options, schedule=tmp_path / "schedule.json", strict=strict))


@pytest.mark.parametrize("early", [False, True])
def test_ranks_connect_when_all_have_their_memory(service, workloads, tmp_path, early):
    """The second rank cannot page-lock the node's host copies. NCCL would hold the first one where it connects."""
    workload = replace(workloads[STRICT, "bf16-offload"], zero_stage=3, optimizer=OptimizerSettings(on_host=True))
    schedule = draw_schedule(random.Random(0), workload, ("cpu",))
    schedule = rerouted(schedule, lambda action: "cpu" if action.group else "cpu_shard")
    schedule = with_host_shards(schedule, workload)
    hosted = sum(group.shard_rests == "host" for group in schedule.groups)
    assert hosted and schedule.publish
    schedule_file.save(tmp_path / "schedule.json", validate.validate(schedule))
    case = dict(options=MODELS["bf16-offload"], schedule=tmp_path / "schedule.json")
    case["strict"] = {"seed": 1, "order": "late", "locks": hosted, "stuck_seconds": 4}
    if not early:
        return assert_one_line(service, case)
    with pytest.raises(Died, match=r"rank 0 of \(0, 1\) waits for ranks \[1\] to connect\n"):
        service.run(**case, reference=False, environment={faults.VARIABLE: "connect_early=1"})


def test_a_rank_that_its_device_has_no_memory_for_ends_all_by_one_line(service, workloads, tmp_path):
    """Of two communicators torch makes one at once, as it makes its process group."""
    workload = replace(workloads[STRICT, "bf16-tied"], zero_stage=3)
    schedule = draw_schedule(random.Random(0), workload, ("gpu",), symmetric=True)
    schedule = rerouted(schedule, lambda action: "gpu" if action.group else "cpu_shard")
    groups = [
        replace(group, algorithm=group.algorithm if index else None) for index, group in enumerate(schedule.groups)
    ]
    schedule = with_host_shards(replace(schedule, groups=tuple(groups)), workload)
    schedule_file.save(tmp_path / "schedule.json", validate.validate(schedule))
    strict = {"seed": 1, "order": "late", "no_room": "shards_on_host.py", "stuck_seconds": 4}
    case = dict(options=MODELS["bf16-tied"], schedule=tmp_path / "schedule.json", strict=strict)
    assert_one_line(service, case, "rank 1 cannot prepare for .*: CUDA out of memory, at shards_on_host.py")


def assert_one_line(
    service, case: dict, said: str = r"page-locked memory: \d+ bytes of host memory cannot be "
) -> None:
    """All ranks end soon, and by the same line."""
    begun = time.monotonic()
    with pytest.raises(Died) as died:
        service.run(**case, reference=False)
    assert time.monotonic() - begun < service.case_seconds  # one that is left in a collective is ended then
    lines = re.findall(rf"^.*InputError: {said}.*$", str(died.value), re.M)
    assert len(set(lines)) == 1 and len(lines) >= 2, (lines, died.value)


@pytest.mark.parametrize(
    ("site", "seed"),
    some(
        [
            (("streams.py", "wait_event"), 5),  # a copy before its block is free, or compute before its copy
            (("drive_copy.py", "when"), 8),  # a copy out of a slot that is not filled
            (("streams.py", "wait"), 6),  # a copy before the other rank's shard is there
            (("drive_copy.py", "poll"), 8),  # a staging slot filled anew while it is still copied from
        ],
        2,
    ),
)
def test_an_ordering_that_is_taken_away_is_seen(service, workloads, tmp_path, site, seed):
    assert is_seen(service, ordering(*site), lambda: strict_case(seed, workloads, tmp_path, 3))
