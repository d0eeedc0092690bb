"""No schedule beats the lower bound."""

import random
from itertools import permutations, product

import pytest
from msgspec.structs import replace

from megatron_ext.cost import model as cost
from megatron_ext.planner import plan
from megatron_ext.planner.assemble import Placed, assemble
from megatron_ext.schedule.validate import validate
from megatron_ext.simulator import simulate
from megatron_ext.simulator.bound import Links, lower_bound
from megatron_ext.simulator.least_loads import layer_bytes
from megatron_ext.simulator.stock import groups_of, layer_buckets
from megatron_ext.simulator.timing import Timing
from planning_cases import line, make_table, make_workload, uneven_case

WORKLOADS = {
    "interleaved": dict(),
    "1f1b, by layer": dict(pp=3, vp=1, order="1f1b", layers=4),
    "gpipe": dict(pp=2, vp=2, order="gpipe"),
    "zero 3, loose": dict(zero_stage=3, layers=2),
    "zero 3, two chunks": dict(zero_stage=3, layers=2, device_bytes=420_000),
    "zero 3, a layer and a half": dict(zero_stage=3, layers=2, device_bytes=150_000),
    "little host memory": dict(pinned_host_bytes=200_000),
}

TABLES = {
    "links": dict(gpu=(5.0, 500.0), cpu=(2.0, 700.0), forward=20.0, backward=40.0),
    "compute": dict(),
    "contention": dict(
        gpu=(5.0, 900.0), cpu=(2.0, 900.0), forward=50.0, backward=90.0,
        contention=(("gpu", "cpu", 1.4), ("cpu", "gpu", 1.3), ("compute", "gpu", 1.2), ("compute", "cpu", 1.1)),
    ),
    "processors": dict(gpu=(5.0, 900.0), topology=cost.Topology(processors_per_node=2.0)),
}  # fmt: skip


@pytest.mark.parametrize("costs", TABLES)
@pytest.mark.parametrize("name", WORKLOADS)
def test_nothing_is_faster(name, costs):
    work = make_workload(**WORKLOADS[name])
    table = make_table(work, **TABLES[costs])
    bound = lower_bound(work, Timing(work, table))
    policies = ["all-gpu", *(f"random:{seed}" for seed in range(6))] + (["hybrid"] if costs != "processors" else [])
    for policy in policies:
        assert plan(work, table, policy=policy).predicted.step_time_us >= bound * (1 - 1e-9), policy


def test_bound_is_tight_where_one_thing_is_the_limit():
    """Compute alone; and one link alone, with compute of no size."""
    work = make_workload(pp=2, vp=1, order="1f1b", zero_stage=1)
    fast = make_table(work, gpu=(0.001, 1e9), cpu=None)
    assert plan(work, fast).predicted.step_time_us == pytest.approx(lower_bound(work, Timing(work, fast)), rel=1e-3)
    slow = make_table(work, gpu=(1.0, 10.0), cpu=None, forward=0.01, backward=0.01, p2p=(0.001, 1e9))
    assert plan(work, slow).predicted.step_time_us == pytest.approx(lower_bound(work, Timing(work, slow)), rel=1e-3)


def with_gradients(table, *, reduce, slower, processors=None, share=0.0):
    """The table with reducing, what compute makes of it, and transports that take processors."""
    def takes(curve):
        return curve and replace(curve, points=tuple(replace(p, processor_us=share * p.p50_us) for p in curve.points))

    table = replace(
        table, reduce=takes(line(*reduce)), contention=(*table.contention, cost.Contention(measured="reduce", busy="compute", slowdown=slower)),
        routes=replace(table.routes, gpu=takes(table.routes.gpu), cpu=takes(table.routes.cpu)),
        publish=replace(table.publish, cpu=takes(table.publish.cpu), internode=takes(table.publish.internode)),
        topology=replace(table.topology, processors_per_node=processors),
    )  # fmt: skip
    return cost.check(table)


PROCESSORS = ((None, 0.0), (1.0, 0.1), (1.5, 0.4), (2.0, 0.9), (4.0, 0.3))


@pytest.mark.parametrize("seed", range(4))
def test_nothing_is_faster_where_gradients_are_reduced_beside_compute(seed):
    work, table = uneven_case(seed)
    for reduce, (processors, share) in product(((2.0, 400.0), (30.0, 4000.0)), PROCESSORS):
        full = with_gradients(table, reduce=reduce, slower=1.0 + seed / 3, processors=processors, share=share)
        bound = lower_bound(work, Timing(work, full))
        for policy in ("all-gpu", "random:1", *(["all-cpu"] if full.routes.cpu else [])):
            try:
                planned = plan(work, full, policy=policy)
            except ValueError:  # a whole chunk does not fit the device's room
                continue
            assert planned.predicted.step_time_us >= bound * (1 - 1e-9), (policy, reduce, processors)


def test_bound_knows_that_compute_slows_reducing_and_shares_processors_with_it():
    """One rank of two on each of two machines with one processor: reducing takes as long as the last
    backward, at two thirds of its speed beside it, and takes a tenth of a processor."""
    work = make_workload(pp=1, vp=1, dp=4, gpus_per_node=2, microbatches=2, layers=20, order="no_pipeline")
    size = work.chunks[0].bytes
    table = make_table(work, gpu=(0.001, 1e9), cpu=None, forward=1000.0, backward=2000.0)
    full = with_gradients(table, reduce=(0.001, size / 4000.0), slower=1.5, processors=1.0, share=0.1)
    bound = lower_bound(work, Timing(work, full))
    # Before: 4 ms compute by two ranks. From there: the first layer's backward with nothing to reduce, then 3.8 ms
    # of compute / (1 - 2 * 0.1 / 1.5), and what is not reduced by then.
    compute = 3800.0 / (1 - 0.2 / 1.5)
    assert bound == pytest.approx(8000.0 + 200.0 + compute + 4000.0 - compute / 1.5, rel=1e-3)
    assert plan(work, full).predicted.step_time_us == pytest.approx(bound, rel=0.06)


def test_bound_knows_that_the_last_layer_is_reduced_after_all_compute():
    """Two ranks on one processor, of which each takes a quarter to reduce: a layer in 400 us, while the
    next one's backward takes 1000 and then 200 more. Only the last one's has nothing to hide behind."""
    work = make_workload(pp=1, vp=1, dp=2, microbatches=1, layers=4, order="no_pipeline")
    table = make_table(work, gpu=(0.001, 1e9), cpu=None, forward=1000.0, backward=2000.0)
    full = with_gradients(table, reduce=(0.001, work.chunks[0].bytes / 1600.0), slower=1.0, processors=1.0, share=0.25)
    bound = lower_bound(work, Timing(work, full))
    assert bound == pytest.approx(2 * 1000.0 + 2 * 2000.0 + 3 * 200.0 + 400.0, rel=1e-3)
    groups, _ = groups_of(work, layer_buckets)
    by_layer = validate(assemble(work, groups, [[Placed(n, "gpu", -1, 0) for n in range(4)]], [[]], planner="test"))
    assert simulate(work, full, by_layer).step_time_us == pytest.approx(bound, rel=1e-3)


def test_no_group_is_larger_than_the_device_may_hold():
    """Nothing larger than one layer fits, so a rate that only larger groups reach is no bound: a host
    copy takes 1000 us of latency, and so comes each layer at zero stage 3."""
    loose = make_workload(pp=1, vp=1, dp=2, microbatches=1, layers=8, order="no_pipeline", zero_stage=3)
    layer = loose.chunks[0].bytes // 8
    tight = make_workload(pp=1, vp=1, dp=2, microbatches=1, layers=8, order="no_pipeline", zero_stage=3, device_bytes=layer + 2048)
    table = make_table(tight, gpu=None, cpu=(1000.0, 1e9), publish=(0.001, 1e9), forward=1.0, backward=1.0)
    bounds = [lower_bound(work, Timing(work, table)) for work in (loose, tight)]
    assert bounds[0] < 2000.0 and bounds[1] > 15 * 1000.0 * layer / (layer + 2048) * 0.99
    assert plan(tight, table).predicted.step_time_us == pytest.approx(bounds[1], rel=0.1)


def test_bound_knows_that_host_copies_are_published_first_and_by_whose_processor():
    """Two ranks on one processor, whose parameters come from the host alone: the first layer's can
    come once they are published, and publishing takes half a processor of each rank from compute."""
    work = make_workload(pp=1, vp=1, dp=2, microbatches=1, layers=10, order="no_pipeline")
    layer = work.chunks[0].bytes / 10
    table = make_table(work, gpu=None, cpu=(0.001, 1e9), publish=(0.001, layer / 100.0), forward=1000.0, backward=2000.0)
    takes = lambda curve: replace(curve, points=tuple(replace(p, processor_us=0.25 * p.p50_us) for p in curve.points))  # noqa: E731
    crowded = cost.check(replace(table, topology=replace(table.topology, processors_per_node=1.0)))
    shared = cost.check(replace(crowded, publish=replace(table.publish, cpu=takes(table.publish.cpu))))
    for given, least in ((table, 100.0 + 3000.0), (crowded, 100.0 + 2 * 3000.0), (shared, max(100.0 + 2 * 3000.0, 2 * (3000.0 + 0.25 * 1000.0)))):
        bound = lower_bound(work, Timing(work, given))
        assert bound == pytest.approx(least, rel=1e-3)
        assert plan(work, given).predicted.step_time_us == pytest.approx(bound, rel=0.06)


def test_bound_counts_all_processor_time_that_gathers_take():
    """Two ranks on one processor, of which an all-gather takes half of each: all of it, while it lasts.
    Compute has at least half and owes what it had of the rest."""
    work = make_workload(pp=1, vp=1, dp=2, microbatches=1, layers=10, order="no_pipeline")
    table = make_table(work, gpu=(0.001, work.chunks[0].bytes / 1000.0), cpu=None, forward=1000.0, backward=2000.0)
    full = with_gradients(table, reduce=(0.001, work.chunks[0].bytes / 200.0), slower=1.0, processors=1.0, share=0.5)
    bound = lower_bound(work, Timing(work, full))
    assert bound == pytest.approx(2 * 3000.0 + 1000.0 + 200.0, rel=1e-3)
    assert plan(work, full).predicted.step_time_us == pytest.approx(bound, rel=0.02)


def test_bound_counts_what_gathers_took_of_processors_before_the_last_backward():
    """Two ranks on one processor, of which an all-gather takes half of each. Reducing takes longer than the
    last backward beside it, so what gathers took before that comes on top: all of it, since from one
    layer to the next there is time to make it good."""
    work = make_workload(pp=1, vp=1, dp=2, microbatches=1, layers=10, order="no_pipeline")
    size = work.chunks[0].bytes
    table = make_table(work, gpu=(0.001, size / 1000.0), cpu=None, forward=1000.0, backward=2000.0)
    full = with_gradients(table, reduce=(0.001, 1e9), slower=1.0, processors=1.0, share=0.5)
    full = cost.check(replace(full, reduce=line(0.001, size / 5000.0)))
    bound = lower_bound(work, Timing(work, full))
    assert bound == pytest.approx(1000.0 + 2 * 1000.0 + 2 * 2000.0 / 10 + 5000.0, rel=1e-3)
    assert plan(work, full).predicted.step_time_us == pytest.approx(bound, rel=0.02)


@pytest.mark.parametrize("seed", range(3))
def test_nothing_is_faster_where_parameters_come_again_and_take_processors(seed):
    """Little room on the device, and so few processors that transports are owed much of what they ask for."""
    draw = random.Random(seed)
    shape = dict(pp=draw.choice((1, 2)), vp=1, order=draw.choice(("1f1b", "gpipe")), dp=4, gpus_per_node=draw.choice((2, 4)), layers=4, zero_stage=3)
    layer = max(max(sizes) for sizes in (layer_bytes(chunk) for chunk in make_workload(**shape).chunks))
    judged = 0
    for _ in range(2):
        work = make_workload(**shape, device_bytes=int(layer * draw.uniform(1.2, 3.5)), microbatches=2)
        routes = dict(gpu=(draw.uniform(1, 50), draw.uniform(100, 5000)), cpu=(2.0, draw.uniform(500, 9000)))
        table = make_table(work, **routes, publish=(draw.uniform(1, 50), draw.uniform(500, 9000)), forward=draw.uniform(5, 200), backward=draw.uniform(5, 300))
        reduce = (draw.uniform(1, 50), draw.uniform(50, 5000))
        full = with_gradients(table, reduce=reduce, slower=draw.uniform(1, 2), processors=draw.choice((0.9, 2.0, 3.0)), share=draw.uniform(0, 0.9))
        bound = lower_bound(work, Timing(work, full))
        for policy in ("all-gpu", "urgency", "random:1", "random:2", *(["hybrid"] if not judged else [])):
            try:
                planned = plan(work, full, policy=policy)
            except ValueError:  # a policy may group more than the device has room for
                continue
            judged += 1
            assert planned.predicted.step_time_us >= bound * (1 - 1e-9), policy
    assert judged > 3


def test_bound_counts_what_messages_take_of_processors():
    """Two stages on one processor; each of 2 x 4 messages takes 30 us of it at both ends."""
    work = make_workload(pp=2, vp=1, dp=1, microbatches=4, order="1f1b", p2p_bytes=4096)
    table = make_table(work, gpu=(0.001, 1e9), cpu=None, p2p=(50.0, 1e9), forward=100.0, backward=200.0, topology=cost.Topology(processors_per_node=1.0))
    taking = replace(table, p2p=cost.Curve(points=tuple(replace(point, processor_us=30.0) for point in table.p2p.points)))
    plain, counted = (lower_bound(work, Timing(work, given)) for given in (table, taking))
    compute = 2 * 4 * 300.0
    assert counted == pytest.approx(compute + 2 * 8 * 30.0, rel=1e-3) and plain < counted
    assert plan(work, taking).predicted.step_time_us >= counted


@pytest.mark.parametrize("seed", range(6))
def test_nothing_is_faster_where_host_copies_are_published_between_nodes(seed):
    draw = random.Random(seed)
    pp, vp, order = draw.choice(((1, 1, "no_pipeline"), (2, 1, "1f1b"), (2, 2, "interleaved")))
    gpus_per_node = draw.choice((1, 2, 4))
    work = make_workload(pp=pp, vp=vp, order=order, dp=4, gpus_per_node=gpus_per_node, layers=4, zero_stage=draw.choice((1, 3)))
    for _ in range(6):
        between = (draw.uniform(1, 50), draw.uniform(100, 5000))
        table = make_table(work, gpu=between, cpu=(2.0, draw.uniform(500, 9000)), publish=(draw.uniform(1, 50), draw.uniform(500, 9000)), forward=draw.uniform(5, 200), backward=draw.uniform(5, 300))
        table = cost.check(replace(table, publish=replace(table.publish, internode=line(*between))))
        disturbed = [(a, b) for a, b in permutations(("gpu", "cpu", "publish"), 2) if draw.random() < 0.5]
        table = replace(table, contention=tuple(cost.Contention(measured=a, busy=b, slowdown=draw.uniform(1, 2.5)) for a, b in disturbed))
        full = with_gradients(table, reduce=between, slower=draw.uniform(1, 2), processors=draw.choice((None, 0.9, 2.0)), share=draw.uniform(0, 0.9))
        bound = lower_bound(work, Timing(work, full))
        for policy in ("all-gpu", "all-cpu", "hybrid", "random:1", "random:2"):
            assert plan(work, full, policy=policy).predicted.step_time_us >= bound * (1 - 1e-9), policy


def test_publishing_and_gathers_on_one_network_bring_no_more_than_it_carries():
    """Ten bytes a microsecond each way alone. A short copy from the host disturbs gathers for as long as it
    takes only, so it costs the mix nearly nothing."""
    work = make_workload(pp=1, vp=1, dp=2, order="no_pipeline")
    both = lambda a, b: ((a, b, 2.0), (b, a, 2.0))  # noqa: E731
    for contention, rate in (((), 20.0), (both("gpu", "publish"), 10.0), (both("gpu", "cpu"), 20.0)):
        table = make_table(work, gpu=(0.001, 10.0), cpu=(0.001, 1e5), publish=(0.001, 10.0), contention=contention)
        links = Links(work, Timing(work, table), 0)
        assert links.least_us(1000.0, first=True) == pytest.approx(1000.0 / rate, rel=0.01)
