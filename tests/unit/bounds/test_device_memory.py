"""What little device memory costs every schedule, and no more."""

import random

import pytest
from planning_cases import make_table, make_workload, uneven_case
from variations import some

from megatron_ext.bounds.critical_path import compute_durations, earliest, tails
from megatron_ext.bounds.device_memory import step_us, with_device_memory
from megatron_ext.bounds.least_loads import layer_bytes
from megatron_ext.bounds.link_rates import LinkRates
from megatron_ext.bounds.lower_bound import lower_bound
from megatron_ext.planner import plan
from megatron_ext.planner.gather_search import search
from megatron_ext.planner.problem import Problem
from megatron_ext.simulator.timing import Timing


def earliest_ends(work, timing, least):
    return earliest(work, timing, least)[1]


def test_a_step_waits_for_what_its_layers_need_beyond_the_limit():
    """Room for two of four layers; a layer comes in 10 us and computes in 1."""
    window = lambda layers: max(layers - 2, 0) * 10.0
    assert step_us([(1, 1.0)] * 4, window) == 1.0 + 20.0 + 1.0
    # From the first layer's end the third is 10 us away; computing the second takes longer, and after it the fourth is
    # 10 away.
    assert step_us([(1, 1.0), (1, 15.0), (1, 1.0), (1, 1.0)], window) == 1.0 + 15.0 + 10.0 + 1.0
    assert step_us([(1, 1.0), (1, 1.0), (0, 5.0), (0, 5.0)], window) == 12.0, (
        "layers without parameters wait for nothing"
    )


def least_of(work, table):
    timing = Timing(work, table)
    links = [LinkRates(work, timing, rank) for rank in range(work.parallel.pp)]
    return timing, with_device_memory(work, timing, links)


def test_steps_are_longer_where_a_chunk_does_not_fit():
    """Twelve layers, room for four: eight come within every step, by a link on which one takes four times its
    forward."""
    shape = dict(pp=4, vp=1, microbatches=4, order="1f1b", layers=12, zero_stage=3)
    layer = layer_bytes(make_workload(**shape).chunks[0])[0]
    work = make_workload(**shape, whole_parameter_bytes=4 * layer)
    table = make_table(work, gpu=(0.001, layer / 400.0), cpu=None, forward=1200.0, backward=2400.0, p2p=(0.001, 1e9))
    timing, least = least_of(work, table)
    assert least.steps[0][0] == pytest.approx((100.0 + 8 * 400.0 + 100.0, 200.0 + 8 * 400.0 + 200.0), rel=1e-3)
    bound = lower_bound(work, timing)
    assert bound > 7 * sum(least.steps[0][0]), (
        "a pipeline of four, four microbatches: seven steps forward, seven back, one after another"
    )
    assert search(Problem(work, timing, ("gpu",)))[1] <= 1.05 * bound


def test_steps_of_two_chunks_wait_for_each_other():
    """Either chunk fits, two layers of either do: nothing within a step or between two layers says more than
    compute."""
    shape = dict(pp=2, vp=2, microbatches=4, layers=2, zero_stage=3)
    layer = layer_bytes(make_workload(**shape).chunks[0])[0]
    work = make_workload(**shape, whole_parameter_bytes=2 * layer)
    table = make_table(work, gpu=(0.001, layer / 1000.0), cpu=None, forward=20.0, backward=40.0, p2p=(0.001, 1e9))
    timing, least = least_of(work, table)
    assert least.steps == compute_durations(work, timing).steps and not any(map(any, least.gaps))
    # From the first step of chunk 0: its second forward, then chunk 1, of which two layers cannot have been there.
    spans = {(first, last): us for first, last, us in least.spans[0]}
    assert spans[1, 2] == pytest.approx(10.0 + 2 * 1000.0 + 10.0, rel=1e-3)
    assert (0, 1) not in spans
    for way in (earliest_ends, tails):
        plain, now = (way(work, timing, durations) for durations in (least._replace(spans=[[], []]), least))
        assert all(later >= earlier for mine, before in zip(now, plain) for later, earlier in zip(mine, before))
        assert sum(map(sum, now)) > 1.5 * sum(map(sum, plain))
    # The first step begins at once; no step ends after what is left from its begin but its own compute.
    assert max(map(max, earliest_ends(work, timing, least))) == pytest.approx(
        max(map(max, tails(work, timing, least))), rel=0.1
    )


def test_gathers_of_a_step_come_after_its_input():
    """Chunks of one layer, and memory for one: each change of the chunk gathers a layer, after the input has come."""
    shape = dict(pp=2, vp=2, microbatches=2, layers=1, zero_stage=3)
    layer = layer_bytes(make_workload(**shape).chunks[0])[0]
    work = make_workload(**shape, whole_parameter_bytes=layer + 1024)  # with padding
    table = make_table(work, gpu=(0.001, layer / 1000.0), cpu=None, forward=10.0, backward=10.0, p2p=(500.0, 1e9))
    timing, least = least_of(work, table)
    # The first micro-batch passes stages 0 to 3 and back. Stages 2 and 3, and 1 and 0 on the way back, are gathered.
    longest = 6 * 500.0 + 4 * 1000.0 + 8 * 10.0
    for way in (earliest_ends, tails):
        assert max(map(max, way(work, timing, least))) >= longest
    assert (
        plan(work, table).predicted.iteration_time_us <= 1.01 * lower_bound(work, timing) + 1000.0
    )  # the first gather


def test_back_and_forth_through_one_chunk_needs_no_more_than_its_steps():
    """What a forward ends with is what the backward begins with, and the other way round."""
    shape = dict(pp=1, vp=1, microbatches=3, order="no_pipeline", layers=5, zero_stage=3)
    layer = layer_bytes(make_workload(**shape).chunks[0])[0]
    work = make_workload(**shape, whole_parameter_bytes=2 * layer)
    table = make_table(work, gpu=(0.001, layer / 1000.0), cpu=None, forward=5.0, backward=10.0)
    timing, least = least_of(work, table)
    assert least.spans == [[]]
    assert least.steps[0][0] == pytest.approx((2 * 1.0 + 3000.0, 2 * 2.0 + 3000.0), rel=1e-3)
    assert plan(work, table).predicted.iteration_time_us == pytest.approx(lower_bound(work, timing), rel=0.01)


@pytest.mark.parametrize("seed", some(range(5), 2))
def test_nothing_is_faster(seed):
    draw = random.Random(seed)
    pp, vp = draw.choice(((1, 1), (2, 1), (3, 1), (2, 2), (3, 2)))
    shape = dict(
        pp=pp,
        vp=vp,
        layers=draw.choice((2, 3, 6)),
        zero_stage=3,
        microbatches=2 * pp,
        order="interleaved" if vp > 1 else "1f1b",
    )
    layer = max(max(layer_bytes(chunk)) for chunk in make_workload(**shape).chunks)
    tighter = 0
    for _ in range(3):
        work = make_workload(**shape, whole_parameter_bytes=int(layer * draw.uniform(1.0, 4.5)))
        links = dict(
            gpu=(draw.uniform(0.1, 20), draw.uniform(100, 5000)),
            cpu=draw.choice((None, (2.0, draw.uniform(300, 5000)))),
        )
        table = make_table(work, **links, forward=draw.uniform(1, 100), backward=draw.uniform(1, 200))
        timing, least = least_of(work, table)
        tighter += any(map(any, least.spans)) or least.steps != compute_durations(work, timing).steps
        bound = lower_bound(work, timing)
        for policy in ("all-gpu", "urgency", "random:1", "random:2"):
            assert plan(work, table, policy=policy).predicted.iteration_time_us >= bound * (1 - 1e-9), policy
    assert tighter


def test_parameters_are_not_divided_between_links():
    """Beside a layer there is room for 5 bytes of the next one's 12. Divided, 7 would come in 3.5 us by two links."""
    work = make_workload(pp=1, vp=1, order="no_pipeline", zero_stage=3)

    def wait_us(free_bytes: int, excess) -> float:
        links = LinkRates(work, Timing(work, make_table(work)), 0)
        links.least_alone_us, links.excess = lambda route, size: float(size), excess
        return links.least_wait_us(free_bytes, (6, 4, 2))

    assert wait_us(5, {}) == 6.0  # 4 stays; 6 by one link, 2 by the other
    assert wait_us(6, {}) == 4.0  # 6 stays
    assert wait_us(12, {}) == 0.0
    # 4 by cpu, beside 2 by gpu for 3
    assert wait_us(6, {("gpu", "cpu"): 0.5, ("cpu", "gpu"): 0.25}) == pytest.approx(4 + 3 * (0.25 / 1.25))


@pytest.mark.parametrize("seed", some(range(200, 212), 6))
def test_no_plan_is_below_the_bound_in_little_room(seed):
    work, table = uneven_case(seed)
    bound = lower_bound(work, Timing(work, table))
    for policy in ("all-gpu", "random:1", "urgency", *(["all-cpu"] if table.routes.cpu else [])):
        try:
            us = plan(work, table, policy=policy).predicted.iteration_time_us
        except ValueError:  # the rule does not keep the limits
            continue
        assert us >= bound * (1 - 1e-9), policy
