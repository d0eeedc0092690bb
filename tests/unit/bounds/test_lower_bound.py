"""No schedule beats the lower bound."""

import random
from itertools import permutations, product

import pytest
from msgspec.structs import replace
from planning_cases import flat, line, make_table, make_workload, uneven_case
from variations import some

from megatron_ext.bounds.least_loads import layer_bytes
from megatron_ext.bounds.lower_bound import lower_bound
from megatron_ext.bounds.memory_headroom import with_most_headroom
from megatron_ext.cost import cost_table as cost
from megatron_ext.planner import plan
from megatron_ext.planner.assemble import Placed, assemble
from megatron_ext.planner.evaluate import evaluate
from megatron_ext.planner.stock import groups_of
from megatron_ext.schedule.user_defined_schedule import StateSlots
from megatron_ext.schedule.validate import validate
from megatron_ext.simulator.timing import Timing
from megatron_ext.workload.bucket_rules import layer_buckets
from megatron_ext.workload.optimizer_settings import OptimizerSettings
from megatron_ext.workload.workload import Limits

WORKLOADS = {
    "interleaved": dict(),
    "1f1b, by layer": dict(pp=3, vp=1, order="1f1b", layers=4),
    "gpipe": dict(pp=2, vp=2, order="gpipe"),
    "zero 3, loose": dict(zero_stage=3, layers=2),
    "zero 3, two chunks": dict(zero_stage=3, layers=2, whole_parameter_bytes=420_000),
    "zero 3, a layer and a half": dict(zero_stage=3, layers=2, whole_parameter_bytes=150_000),
    "little host memory": dict(pinned_host_bytes=200_000),
}

TABLES = {
    "links": dict(gpu=(5.0, 500.0), cpu=(2.0, 700.0), forward=20.0, backward=40.0),
    "compute": dict(),
    "contention": dict(
        gpu=(5.0, 900.0),
        cpu=(2.0, 900.0),
        forward=50.0,
        backward=90.0,
        contention=(("gpu", "cpu", 1.4), ("cpu", "gpu", 1.3), ("compute", "gpu", 1.2), ("compute", "cpu", 1.1)),
    ),
}


@pytest.mark.parametrize("costs", TABLES)
@pytest.mark.parametrize("name", some([*WORKLOADS], 2))
def test_nothing_is_faster(name, costs):
    work = make_workload(**WORKLOADS[name])
    table = make_table(work, **TABLES[costs])
    bound = lower_bound(work, Timing(work, table))
    policies = ["all-gpu", *(f"random:{seed}" for seed in some(range(6), 2))]
    if costs in some(("contention", "links", "compute"), 1):
        policies.append("hybrid")
    for policy in policies:
        assert plan(work, table, policy=policy).predicted.iteration_time_us >= bound * (1 - 1e-9), policy


def test_bound_is_tight_where_one_thing_is_the_limit():
    """Compute alone; and one link alone, with compute of no size."""
    work = make_workload(pp=2, vp=1, order="1f1b", zero_stage=1)
    fast = make_table(work, gpu=(0.001, 1e9), cpu=None)
    assert plan(work, fast).predicted.iteration_time_us == pytest.approx(
        lower_bound(work, Timing(work, fast)), rel=1e-3
    )
    slow = make_table(work, gpu=(1.0, 10.0), cpu=None, forward=0.01, backward=0.01, p2p=(0.001, 1e9))
    assert plan(work, slow).predicted.iteration_time_us == pytest.approx(
        lower_bound(work, Timing(work, slow)), rel=1e-3
    )


def with_gradients(table, *, reduce, slower):
    """The table with reducing, and what compute makes of it."""
    rows = (*table.contention, cost.Contention(measured="reduce", busy="compute", slowdown=slower))
    return cost.check(replace(table, reduce=line(*reduce), contention=rows))


@pytest.mark.parametrize("seed", some(range(4), 1))
def test_nothing_is_faster_where_gradients_are_reduced_beside_compute(seed):
    work, table = uneven_case(seed)
    for reduce in ((2.0, 400.0), (30.0, 4000.0)):
        full = with_gradients(table, reduce=reduce, slower=1.0 + seed / 3)
        bound = lower_bound(work, Timing(work, full))
        for policy in ("all-gpu", "random:1", *(["all-cpu"] if full.routes.cpu else [])):
            try:
                planned = plan(work, full, policy=policy)
            except ValueError:  # a whole chunk does not fit the device's room
                continue
            assert planned.predicted.iteration_time_us >= bound * (1 - 1e-9), (policy, reduce)


def test_bound_knows_that_compute_slows_reducing():
    """Reducing takes twice as long as the last backward, and runs at two thirds of its speed beside it."""
    work = make_workload(pp=1, vp=1, dp=4, microbatches=2, layers=20, order="no_pipeline")
    table = make_table(work, gpu=(0.001, 1e9), cpu=None, forward=1000.0, backward=2000.0)
    full = with_gradients(table, reduce=(0.001, work.chunks[0].bytes / 4000.0), slower=1.5)
    bound = lower_bound(work, Timing(work, full))
    # Before: 4 ms of compute. From there: the first layer's backward with nothing to reduce, then 1.9 ms of compute,
    # and what is not reduced by then.
    assert bound == pytest.approx(4000.0 + 100.0 + 1900.0 + 4000.0 - 1900.0 / 1.5, rel=1e-3)
    assert plan(work, full).predicted.iteration_time_us == pytest.approx(bound, rel=0.06)


def test_bound_knows_that_the_last_layer_is_reduced_after_all_compute():
    """A layer is reduced in 400 us, while the next one's backward takes 500. Only the last one is not hidden."""
    work = make_workload(pp=1, vp=1, dp=2, microbatches=1, layers=4, order="no_pipeline")
    table = make_table(work, gpu=(0.001, 1e9), cpu=None, forward=1000.0, backward=2000.0)
    full = with_gradients(table, reduce=(0.001, work.chunks[0].bytes / 1600.0), slower=1.0)
    bound = lower_bound(work, Timing(work, full))
    assert bound == pytest.approx(1000.0 + 2000.0 + 400.0, rel=1e-3)
    groups, _ = groups_of(work, layer_buckets)
    by_layer = validate(assemble(work, groups, [[Placed(n, "gpu", -1, 0) for n in range(4)]], [[]], planner="test"))
    assert evaluate(work, full, by_layer).iteration_time_us == pytest.approx(bound, rel=1e-3)


def test_no_group_is_larger_than_the_device_may_hold():
    """Nothing larger than one layer fits, so a rate that only larger groups reach is no bound: a host
    copy takes 1000 us of latency, and so comes each layer at zero stage 3."""
    sizes = dict(pp=1, vp=1, dp=2, microbatches=1, layers=8, order="no_pipeline", zero_stage=3)
    loose = make_workload(**sizes)
    layer = loose.chunks[0].bytes // 8
    tight = make_workload(**sizes, whole_parameter_bytes=layer + 2048)
    table = make_table(tight, gpu=None, cpu=(1000.0, 1e9), publish=(0.001, 1e9), forward=1.0, backward=1.0)
    bounds = [lower_bound(work, Timing(work, table)) for work in (loose, tight)]
    assert bounds[0] < 2000.0 and bounds[1] > 15 * 1000.0 * layer / (layer + 2048) * 0.99
    assert plan(tight, table).predicted.iteration_time_us == pytest.approx(bounds[1], rel=0.1)


def test_bound_knows_that_host_copies_are_published_first():
    """Parameters come from the host alone: those of the first layer can come once they are published."""
    work = make_workload(pp=1, vp=1, dp=2, microbatches=1, layers=10, order="no_pipeline")
    layer = work.chunks[0].bytes / 10
    table = make_table(
        work, gpu=None, cpu=(0.001, 1e9), publish=(0.001, layer / 100.0), forward=1000.0, backward=2000.0
    )
    bound = lower_bound(work, Timing(work, table))
    assert bound == pytest.approx(100.0 + 3000.0, rel=1e-3)
    assert plan(work, table).predicted.iteration_time_us == pytest.approx(bound, rel=0.06)


def test_bound_knows_that_one_rank_reduces_after_the_groups_of_another_have_come():
    """Rank 1 waits for its group, then both compute, then rank 0 reduces."""
    work = make_workload(pp=2, vp=1, microbatches=1, layers=1, order="1f1b")
    first, second = work.chunks
    work = replace(work, chunks=(replace(first, parameters=first.parameters[:1]), second))
    table = make_table(
        work, gpu=(0.01, second.bytes / 3000.0), cpu=None, forward=100.0, backward=1000.0, p2p=(0.01, 1e9)
    )
    table = replace(table, reduce=flat(2000.0))
    bound = lower_bound(work, Timing(work, table))
    assert bound == pytest.approx(3000.0 + 100.0 + 1000.0 + 1000.0 + 2000.0, rel=1e-3)
    assert plan(work, table).predicted.iteration_time_us == pytest.approx(bound, rel=1e-3)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(3))
def test_nothing_is_faster_where_parameters_are_gathered_again(seed):
    """Little device memory."""
    draw = random.Random(seed)
    shape = dict(
        pp=draw.choice((1, 2)),
        vp=1,
        order=draw.choice(("1f1b", "gpipe")),
        dp=4,
        gpus_per_node=draw.choice((2, 4)),
        layers=4,
        zero_stage=3,
    )
    layer = max(max(sizes) for sizes in (layer_bytes(chunk) for chunk in make_workload(**shape).chunks))
    judged = 0
    for _ in range(2):
        work = make_workload(**shape, whole_parameter_bytes=int(layer * draw.uniform(1.2, 3.5)), microbatches=2)
        routes = dict(gpu=(draw.uniform(1, 50), draw.uniform(100, 5000)), cpu=(2.0, draw.uniform(500, 9000)))
        table = make_table(
            work,
            **routes,
            publish=(draw.uniform(1, 50), draw.uniform(500, 9000)),
            forward=draw.uniform(5, 200),
            backward=draw.uniform(5, 300),
        )
        reduce = (draw.uniform(1, 50), draw.uniform(50, 5000))
        full = with_gradients(table, reduce=reduce, slower=draw.uniform(1, 2))
        bound = lower_bound(work, Timing(work, full))
        for policy in ("all-gpu", "urgency", "random:1", "random:2", *(["hybrid"] if not judged else [])):
            try:
                planned = plan(work, full, policy=policy)
            except ValueError:  # a policy may group more than the device has room for
                continue
            judged += 1
            assert planned.predicted.iteration_time_us >= bound * (1 - 1e-9), policy
    assert judged > 3


@pytest.mark.parametrize("seed", some(range(6), 2))
def test_nothing_is_faster_where_host_copies_are_published_between_nodes(seed):
    draw = random.Random(seed)
    pp, vp, order = draw.choice(((1, 1, "no_pipeline"), (2, 1, "1f1b"), (2, 2, "interleaved")))
    gpus_per_node = draw.choice((1, 2, 4))
    work = make_workload(
        pp=pp, vp=vp, order=order, dp=4, gpus_per_node=gpus_per_node, layers=4, zero_stage=draw.choice((1, 3))
    )
    for _ in range(3):
        between = (draw.uniform(1, 50), draw.uniform(100, 5000))
        table = make_table(
            work,
            gpu=between,
            cpu=(2.0, draw.uniform(500, 9000)),
            publish=(draw.uniform(1, 50), draw.uniform(500, 9000)),
            forward=draw.uniform(5, 200),
            backward=draw.uniform(5, 300),
        )
        table = cost.check(replace(table, publish=replace(table.publish, internode=line(*between))))
        disturbed = [(a, b) for a, b in permutations(("gpu", "cpu", "publish"), 2) if draw.random() < 0.5]
        table = replace(
            table,
            contention=tuple(cost.Contention(measured=a, busy=b, slowdown=draw.uniform(1, 2.5)) for a, b in disturbed),
        )
        full = with_gradients(table, reduce=between, slower=draw.uniform(1, 2))
        bound = lower_bound(work, Timing(work, full))
        for policy in ("all-gpu", "all-cpu", "hybrid", "random:1", "random:2"):
            assert plan(work, full, policy=policy).predicted.iteration_time_us >= bound * (1 - 1e-9), policy


@pytest.mark.parametrize("known", [("host_step", "host_add"), ("host_step",)])
@pytest.mark.parametrize("device_us", [1.0, 400.0])
def test_nothing_is_faster_with_any_states_on_the_device_or_the_drive(known, device_us):
    """Every choice of groups, stepped during the backward where the table knows what that takes or at its end."""
    work = make_workload(pp=1, vp=1, microbatches=2, order="no_pipeline", layers=3, zero_stage=3, p2p_bytes=0)
    work = replace(work, optimizer=OptimizerSettings(on_host=True), limits=Limits(device_bytes=10**9))
    groups, _ = groups_of(work, layer_buckets)
    size = groups[0].bytes
    curves = {"host_step": line(30.0, size / 300.0), "host_add": line(0.1, 1e9)}
    table = replace(
        make_table(work, gpu=(1.0, 1e9), cpu=None, nvme=(1.0, size / 50.0), forward=30.0, backward=60.0),
        reduce=line(0.1, 1e9),
        device_step=line(1.0, size / device_us),
        optimizer=line(40.0, size / 320.0),
        **{name: curves[name] for name in known},
    )
    bound = lower_bound(with_most_headroom(work), Timing(work, table))
    placed = [[Placed(n, "gpu", -1, 0) for n in range(3)]]
    schedule = validate(assemble(work, groups, placed, [[]], planner="test"))
    times = {}
    slots = StateSlots(slots=3, slot_bytes=1 << 20)
    for chosen, room in product(product((None, "device", "nvme"), repeat=3), (None, 10**9)):
        kept = tuple(replace(group, states_rest=rest) for group, rest in zip(groups, chosen))
        tried = replace(schedule, groups=kept, rollback_bytes=room, state_slots=slots if "nvme" in chosen else None)
        result = evaluate(work, table, validate(tried), extrapolate=True)
        times[chosen, room] = result.iteration_time_us
        assert result.iteration_time_us >= bound * (1 - 1e-9) and result.lower_bound_us == pytest.approx(bound)
    on_host, on_device = times[(None,) * 3, None], times[("device",) * 3, None]
    assert (on_device < on_host) == (device_us < 300.0)
    assert on_device >= bound + device_us
    late, beside = (times[("nvme",) * 3, room] for room in (None, 10**9))
    assert beside < late if "host_add" in known else beside == late
