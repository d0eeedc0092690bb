"""The exact policy against exhaustion, and the hybrid policy against the exact one."""

from itertools import permutations, product

import pytest
from msgspec.structs import replace
from planning_cases import line, make_table, make_workload, random_case
from variations import some

from megatron_ext.cost import cost_table as cost
from megatron_ext.formats.errors import InputError
from megatron_ext.planner import exact, plan, search_note
from megatron_ext.planner.assemble import Placed, assemble
from megatron_ext.planner.evaluate import evaluate
from megatron_ext.planner.exact import EXACT, solve_groups
from megatron_ext.planner.gather_search import GatherSearch, GridPoint
from megatron_ext.planner.policies import PROVEN
from megatron_ext.planner.problem import Problem
from megatron_ext.planner.stock import groups_of
from megatron_ext.simulator.timing import Timing
from megatron_ext.workload import workload
from megatron_ext.workload.bucket_rules import layer_buckets


@pytest.mark.parametrize("speeds", some([(900.0, 700.0), (400.0, 1500.0), (3000.0, 300.0)], 1))
def test_exact_is_no_worse_than_every_order_and_route_of_layer_groups(speeds):
    work = make_workload(pp=1, vp=1, microbatches=1, layers=4, order="no_pipeline")
    table = make_table(work, gpu=(5.0, speeds[0]), cpu=(3.0, speeds[1]), forward=80.0, backward=160.0)
    groups, _ = groups_of(work, layer_buckets)
    best = min(
        evaluate(
            work, table, assemble(work, groups, [[Placed(g, r[g], -1, 0) for g in order]], planner="test")
        ).iteration_time_us
        for order in permutations(range(4))
        for r in product(("gpu", "cpu"), repeat=4)
    )
    best_known = plan(work, table, policy="exact")
    assert best_known.predicted.iteration_time_us <= best * (1 + 1e-6)
    assert -1e-6 <= best_known.metadata.options.proven_gap <= 1e-4


def test_what_the_training_thread_takes_at_least_is_proven():
    """The solver's model knows no launches. Where these are the limit, no schedule is faster by the rest of them."""
    work = make_workload(pp=1, vp=1, microbatches=1, layers=2, order="no_pipeline")
    table = make_table(work, launches=cost.Launches(reduce_us=0.0, tensor_us=0.0))
    slow = [replace(row, forward_launch_us=5e3, backward_launch_us=5e3) for row in table.compute]
    found = plan(work, replace(table, compute=tuple(slow)), policy="exact")
    assert found.metadata.options.proven_gap <= PROVEN and search_note(found).startswith("Proven")


def test_what_is_not_ruled_out_is_a_part_of_the_iteration():
    work = make_workload(pp=1, vp=1, microbatches=1, layers=2, order="no_pipeline")
    found = plan(work, make_table(work), policy="all-gpu")
    options = replace(found.metadata.options, proven_gap=1.5)
    found = replace(found, metadata=replace(found.metadata, options=options))
    assert "up to 60.00% shorter is not ruled out" in search_note(found)


def test_hybrid_is_near_exact_on_random_small_cases():
    """A sample of both zero stages."""
    gaps = []
    for seed in some(range(4), 2):
        work, table = random_case(seed)
        hybrid, proven = (
            plan(work, table, policy=policy).predicted.iteration_time_us for policy in ("hybrid", "exact")
        )
        assert proven <= hybrid * (1 + 1e-9)
        gaps.append(hybrid / proven - 1)
    assert sum(gaps) / len(gaps) <= 0.005 and max(gaps) <= 0.03


def test_the_proof_knows_that_a_block_waits_where_its_group_is_used():
    """One block of four layers, with a group of another dtype for the last of them alone: three layers run while it
    comes. No bound may lie above what a schedule of these groups takes."""
    made = make_workload(pp=1, vp=1, microbatches=1, layers=4, order="no_pipeline")
    (chunk,) = made.chunks
    late = tuple(
        replace(p, dtype="float32", bytes=2 * p.bytes) if p.layer == 3 and p.name.endswith("fc2") else p
        for p in chunk.parameters
    )
    work = workload.check(replace(made, chunks=(replace(chunk, parameters=late),)))
    table = make_table(work, gpu=(20.0, 1000.0), cpu=None, forward=400.0, backward=800.0)
    timing = Timing(work, table)
    given = GatherSearch(Problem(work, timing, ("gpu",))).made(GridPoint(0, 0, 0, 0))
    assert given is not None
    blocks = given.blocks
    assert len(blocks.blocks) == 1 and len(blocks.groups) == 2  # coarsest cut, a group a dtype
    in_order = assemble(work, blocks.groups, [[Placed(group, "gpu", -1, 0) for group in (0, 1)]], planner="test")
    us = evaluate(work, table, in_order).iteration_time_us
    arrived = sum(timing.gather_us("gpu", group.bytes) for group in blocks.groups)
    assert us < arrived + 400 + 800  # the second comes while layers run
    _, bound = solve_groups(work, timing, given, in_order, 2 * us, EXACT.work)
    assert us * 0.9 < bound <= us * (1 + 1e-6)


@pytest.mark.parametrize("made, choices", [(lambda grid, settings: None, EXACT.choices), (GatherSearch.made, 1)])
def test_what_is_not_solved_is_said_to_be_so(monkeypatch, made, choices):
    work = make_workload(pp=1, vp=1, microbatches=1, layers=2, order="no_pipeline")
    table = make_table(work)
    known = plan(work, table, policy="all-gpu")
    monkeypatch.setattr(GatherSearch, "made", made)
    monkeypatch.setattr(exact, "EXACT", EXACT._replace(choices=choices))
    said = f"policy = 'exact': every grouping exceeds the limits, has more than {choices} choices"
    with pytest.raises(InputError, match=said):
        exact.exact_schedule(Problem(work, Timing(work, table), ("gpu",)), known, known.predicted.iteration_time_us)


def test_exact_proves_no_more_than_is_so_where_gradients_are_reduced():
    """Reducing beside the last backward: what the model proves lies below what is found."""
    from megatron_ext.planner.exact import EXACT, solve

    work = make_workload(pp=1, vp=1, order="no_pipeline", microbatches=2, layers=4)
    table = make_table(work, cpu=None, reduce=line(1, 2e3), forward=100, backward=400)
    known = plan(work, table, policy="all-gpu")
    _, found, proven = solve(
        Problem(work, Timing(work, table), ("gpu",)), known, known.predicted.iteration_time_us, EXACT
    )
    assert proven <= found < known.predicted.iteration_time_us
