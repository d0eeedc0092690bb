"""Small cases with unequal layers and little memory: limits are kept, and a plan that is a baseline says so."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from planning_cases import least_room, make_table, make_workload, random_case, uneven_case
from variations import ALL, some

from megatron_ext.planner import local_search, plan, search_note
from megatron_ext.planner.gather_search import search
from megatron_ext.planner.local_search import Annealing, groupings, improve
from megatron_ext.planner.passes.cut_groups import by_parameter, halves
from megatron_ext.planner.problem import Problem
from megatron_ext.schedule.match import match
from megatron_ext.schedule.validate import validate
from megatron_ext.simulator.simulation import simulate
from megatron_ext.simulator.timing import Timing
from megatron_ext.workload import workload


def unequal(times: list[int], limit: float, *, microbatches: int) -> workload.Workload:
    """One rank with layers of ``times`` the size of the smallest, and ``limit`` times the least room for them."""
    base = make_workload(
        pp=1, vp=1, order="no_pipeline", layers=len(times), microbatches=microbatches, zero_stage=3, hidden=32
    )
    (chunk,) = base.chunks
    parameters = tuple(
        replace(p, shape=(p.shape[0] * times[p.layer], *p.shape[1:]), bytes=p.bytes * times[p.layer])
        for p in chunk.parameters
    )
    work = workload.check(replace(base, chunks=(replace(chunk, parameters=parameters),)))
    room = int(least_room(work) * limit)
    return workload.check(replace(work, limits=workload.Limits(whole_parameter_bytes=room)))


@settings(max_examples=6 if ALL else 3, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    times=st.lists(st.sampled_from((1, 1, 2, 4, 8)), min_size=2, max_size=3),
    limit=st.floats(1.0, 1.3),
    speeds=st.tuples(st.floats(300, 6000), st.one_of(st.none(), st.floats(300, 6000))),
    forward=st.floats(5, 100),
)
def test_a_plan_in_little_memory_is_never_a_baseline_without_a_word(times, limit, speeds, forward):
    work = unequal(times, limit, microbatches=2)
    gpu, cpu = speeds
    table = make_table(
        work, gpu=(2.0, gpu), cpu=None if cpu is None else (2.0, cpu), forward=forward, backward=2 * forward
    )
    planned = plan(work, table)
    match(validate(planned), work)
    predicted, best = planned.predicted, min(planned.predicted.baselines_us.values())
    assert predicted.iteration_time_us <= best * (1 + 1e-9)
    assert predicted.iteration_time_us >= predicted.lower_bound_us * (1 - 1e-9)
    if predicted.iteration_time_us >= best * (1 - 1e-9):
        rule, note = planned.metadata.options.rule, search_note(planned)
        assert rule is not None and note is not None and rule in note
    else:
        assert search_note(planned) is None


@pytest.mark.parametrize("seed", some((2, 86, 125), 2))
def test_every_change_keeps_the_limits_and_the_best_is_what_it_says(monkeypatch, seed):
    """Also with host memory for some groups alone, and a parameter that several blocks use."""
    work, table = uneven_case(seed)
    timing = Timing(work, table)
    routes = ("gpu", "cpu") if table.routes.cpu else ("gpu",)
    monkeypatch.setattr(local_search, "CHANGES", 2)
    found, us = search(Problem(work, timing, routes), effort=0.02)
    better, better_us = improve(Problem(work, timing, routes), found, us)
    match(validate(better), work)
    assert better_us <= us
    assert simulate(work, timing, better, bound_us=0.0).iteration_time_us == better_us


def test_a_group_gives_up_its_host_copy_to_one_of_another_rank(monkeypatch):
    """Pinned memory is full, so no host copy can be added: only an exchange changes which groups have one."""
    work, table = random_case(9)
    timing = Timing(work, table)
    problem = Problem(work, timing, ("gpu", "cpu"))
    given = groupings(problem, search(problem, effort=0.02)[0])[0]
    monkeypatch.setattr(local_search, "EXCHANGES", 1.0)
    one = Annealing(work, timing, given)

    def hosted() -> frozenset[int]:
        rows = [(rank, now) for rank, now in zip(one.ranks, one.now)]
        return frozenset(rank.gaps[n].group for rank, now in rows for n in now.order if now.routes[n] == "cpu")

    before, seen = hosted(), set()
    for _ in range(30):
        one.run(1)
        seen.add(hosted())
    ranks = {tuple(sorted(given.blocks.groups[group].pp_rank for group in copies)) for copies in seen}
    assert before and len(seen) > 1 and len(ranks) > 1
    assert {len(copies) for copies in seen} == {len(before)}


def test_groups_are_tried_in_halves_too():
    work = make_workload(zero_stage=3)
    parameters = list(work.chunks[0].parameters)
    cut = halves(None, parameters)
    assert [p for half in cut for p in half] == parameters
    first, second = (sum(p.bytes for p in half) for half in cut)
    assert abs(first - second) <= max(p.bytes for p in parameters)
    assert halves(None, parameters[:1]) == [parameters[:1]]
    small = by_parameter(parameters)[-1]
    assert halves(by_parameter, parameters)[-2:] == halves(None, small) and len(small) > 1


def test_decisions_of_a_schedule_give_this_schedule():
    work, table = uneven_case(257)
    timing = Timing(work, table)
    problem = Problem(work, timing, ("gpu",))
    for found in groupings(problem, search(problem, effort=0.02)[0]):
        one = Annealing(work, timing, found)
        again = [rank.decisions_of(one.best, number) for number, rank in enumerate(one.ranks)]
        before = one.best_us
        one.cost(again)
        assert one.best_us == before
        assert all(
            decision.kept | set(decision.order) == set(range(len(rank.gaps)))
            for decision, rank in zip(again, one.ranks)
        )


def test_annealing_beats_the_placement_pass_where_layers_are_unequal(monkeypatch):
    work, table = uneven_case(257)
    timing = Timing(work, table)
    monkeypatch.setattr(local_search, "CHANGES", 20)
    found, us = search(Problem(work, timing, ("gpu",)), effort=0.1)
    assert improve(Problem(work, timing, ("gpu",)), found, us)[1] < 0.98 * us
