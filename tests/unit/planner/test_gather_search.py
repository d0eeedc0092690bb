"""The search behind ``hybrid``: what it finds where rules of thumb do not."""

import random

import pytest
from msgspec.structs import replace
from planning_cases import least_room, line, make_table, make_workload
from variations import some

from megatron_ext.bounds.lower_bound import lower_bound
from megatron_ext.cost import cost_table as cost
from megatron_ext.planner import gather_search as search_module
from megatron_ext.planner import plan, search_note
from megatron_ext.planner.gather_search import GatherSearch, search
from megatron_ext.planner.passes.place_gathers import GatherPlacer, place_gathers
from megatron_ext.planner.problem import Problem
from megatron_ext.simulator.timing import Timing
from megatron_ext.workload import workload


def test_gathers_keep_out_of_the_way_of_gradients_that_are_reduced():
    """All-gathers queue behind reduces, on one communicator: both links before the last backward, the host's copies in
    it."""
    shape = dict(pp=2, vp=1, microbatches=4, order="1f1b", layers=6, zero_stage=3)
    layer = make_workload(**shape).chunks[0].bytes // 6
    work = make_workload(**shape, whole_parameter_bytes=3 * layer + 4096)
    table = make_table(
        work, gpu=(1.0, layer / 300.0), cpu=(1.0, layer / 300.0), publish=(0.1, 1e9), forward=600.0, backward=900.0
    )
    table = cost.check(replace(table, reduce=line(1.0, layer / 900.0)))
    found, found_us = search(Problem(work, Timing(work, table), ("gpu", "cpu")))
    for rank in found.ranks:
        *before, last = [[action.route for action in entry.unshard] for entry in rank.steps if entry.unshard]
        assert {route for routes in before for route in routes} == {"gpu", "cpu"}
        assert 2 * last.count("gpu") < last.count("cpu"), "some may be on their way before the first reduce"
    assert found_us < 0.85 * search(Problem(work, Timing(work, table), ("cpu",)))[1]
    assert found_us < 1.1 * lower_bound(work, Timing(work, table))


@pytest.mark.nightly
def test_unequal_layers_in_room_for_the_largest_alone_are_searched():
    """Blocks of about equal bytes would join layers that do not fit together; a rule would be 5 % slower and more."""
    base = make_workload(pp=1, vp=1, order="no_pipeline", layers=4, microbatches=2, zero_stage=3)
    (chunk,) = base.chunks
    times = (1, 1, 1, 8)
    parameters = tuple(
        replace(p, shape=(p.shape[0] * times[p.layer], *p.shape[1:]), bytes=p.bytes * times[p.layer])
        for p in chunk.parameters
    )
    work = workload.check(replace(base, chunks=(replace(chunk, parameters=parameters),)))
    limit = int(least_room(work) * 1.05)
    work = workload.check(replace(work, limits=workload.Limits(whole_parameter_bytes=limit)))
    planned = plan(work, make_table(work, gpu=(5.0, 3000.0), cpu=(5.0, 2000.0), forward=200.0, backward=400.0))
    assert search_note(planned) is None
    assert max(planned.predicted.peak_bytes["device"]) <= limit
    assert planned.predicted.iteration_time_us < 0.95 * min(planned.predicted.baselines_us.values())


@pytest.mark.parametrize("seed", some(range(6), 1))
def test_tied_embeddings_in_little_room(seed):
    """A parameter of the first layer that the last layer uses too stays between them, and nothing else has to."""
    draw = random.Random(seed)
    base = make_workload(pp=1, vp=1, order="no_pipeline", layers=4, microbatches=2, zero_stage=3)
    (chunk,) = base.chunks
    tied = (replace(chunk.parameters[0], borrowed_by=(3,)), *chunk.parameters[1:])
    work = workload.check(replace(base, chunks=(replace(chunk, parameters=tied),)))
    limit = int(least_room(work) * draw.choice((1.0, 1.3, 2.0)))
    work = workload.check(replace(work, limits=workload.Limits(whole_parameter_bytes=limit)))
    planned = plan(work, make_table(work, gpu=(5.0, draw.uniform(1000, 5000))))
    assert search_note(planned) is None
    assert max(planned.predicted.peak_bytes["device"]) <= limit


def test_two_routes_over_one_link_are_not_mixed_where_that_only_slows_both():
    """A fairly shared link: the copy is the faster way, and an all-gather beside it takes from it."""
    work = make_workload(
        pp=1, vp=1, order="no_pipeline", microbatches=2, layers=6, zero_stage=3, whole_parameter_bytes=297_000
    )  # room for three layers
    shared = (("gpu", "cpu", 2.0), ("cpu", "gpu", 2.0))
    table = make_table(
        work, gpu=(1.0, 1000.0), cpu=(1.0, 2000.0), publish=(0.1, 1e6), forward=160.0, backward=320.0, contention=shared
    )
    routes = [
        action.route
        for rank in plan(work, table).ranks
        for entry in (rank.start, *rank.steps)
        for action in entry.unshard
    ]
    assert routes.count("cpu") > 0.9 * len(routes)


def test_a_search_ends_after_some_starts_that_find_nothing_better(monkeypatch):
    work = make_workload(pp=1, vp=1, order="no_pipeline", microbatches=2, layers=12, zero_stage=3)
    problem = Problem(work, Timing(work, make_table(work, gpu=(1.0, 2000.0), cpu=(1.0, 1000.0))), ("gpu", "cpu"))
    found = []
    for fruitless in (search_module.FRUITLESS, 100):
        monkeypatch.setattr(search_module, "FRUITLESS", fruitless)
        state = GatherSearch(problem)
        state.descend()
        found.append((min(state.estimates.values()), len(state.estimates)))
    assert found[0][0] == found[1][0] and found[0][1] < found[1][1]


def test_starts_for_which_sizes_were_not_measured_do_not_end_the_search():
    """Groups of more than a layer, which the first starts have, cannot be gathered by either route."""
    work = make_workload(pp=1, vp=1, dp=2, order="no_pipeline", layers=8, hidden=256, zero_stage=1)
    layer = sum(p.bytes for p in work.chunks[0].parameters if p.layer == 0)
    table = make_table(work, gpu=(20.0, 1e4), cpu=(1.0, 5e3))

    def up_to(curve, most):
        points = [point for point in curve.points if point.size_bytes < most]
        return replace(curve, points=(*points, replace(points[-1], size_bytes=int(most))))

    routes = replace(table.routes, gpu=up_to(table.routes.gpu, 1.3 * layer), cpu=up_to(table.routes.cpu, 0.5 * layer))
    assert search(Problem(work, Timing(work, replace(table, routes=routes)), ("gpu", "cpu")))


@pytest.mark.parametrize(("pp", "order"), [(1, "no_pipeline"), (2, "1f1b")])
def test_a_plan_that_is_known_is_not_placed_again(pp, order, monkeypatch):
    """An estimate is that of a placement pass with the setting's own horizon, though most horizons share a pass."""
    shape = dict(pp=pp, vp=1, microbatches=3, order=order, layers=6, zero_stage=3)
    layer = make_workload(**shape).chunks[0].bytes // 6
    work = make_workload(**shape, whole_parameter_bytes=3 * layer + 4096)
    table = make_table(work, gpu=(1.0, layer / 300.0), cpu=(1.0, layer / 200.0), forward=200.0, backward=400.0)
    timing, passes, place = Timing(work, table), [], GatherPlacer.place
    monkeypatch.setattr(GatherPlacer, "place", lambda self, *given: passes.append(given) or place(self, *given))
    monkeypatch.setattr(search_module, "FRUITLESS", 100)
    state = GatherSearch(Problem(work, timing, ("gpu", "cpu")))
    state.descend()
    assert len(passes) < 0.6 * len(state.estimates)
    for settings, us in state.estimates.items():
        made = state.made(settings)
        assert us == (place_gathers(work, timing, *made).end_us if made else float("inf")), settings
