"""The exact policy against exhaustion, and the hybrid policy against the exact one."""

import random
from itertools import permutations, product

import pytest
from msgspec.structs import replace

from megatron_ext.planner import plan
from megatron_ext.planner.assemble import Placed, assemble
from megatron_ext.simulator import simulate
from megatron_ext.simulator.stock import groups_of, layer_buckets
from megatron_ext.workload import model as workload
from planning_cases import make_table, make_workload, random_case


@pytest.mark.parametrize("speeds", [(900.0, 700.0), (400.0, 1500.0), (3000.0, 300.0)])
def test_exact_is_no_worse_than_every_order_and_route_of_layer_groups(speeds):
    work = make_workload(pp=1, vp=1, microbatches=1, layers=4, order="no_pipeline")
    table = make_table(work, gpu=(5.0, speeds[0]), cpu=(3.0, speeds[1]), forward=80.0, backward=160.0)
    groups, _ = groups_of(work, layer_buckets)
    best = min(
        simulate(work, table, assemble(work, groups, [[Placed(g, r[g], -1, 0) for g in order]], planner="test")).step_time_us
        for order in permutations(range(4)) for r in product(("gpu", "cpu"), repeat=4)
    )  # fmt: skip
    exact = plan(work, table, policy="exact")
    assert exact.predicted.step_time_us <= best * (1 + 1e-6)
    assert -1e-6 <= exact.metadata.options["proven_gap"] <= 1e-4


def test_hybrid_is_near_exact_on_random_small_cases():
    """The full count is in benchmarks/exact_gaps.py; here a sample of both zero stages."""
    gaps = []
    for seed in range(8):
        work, table = random_case(seed)
        hybrid, exact = (plan(work, table, policy=policy).predicted.step_time_us for policy in ("hybrid", "exact"))
        assert exact <= hybrid * (1 + 1e-9)
        gaps.append(hybrid / exact - 1)
    assert sum(gaps) / len(gaps) <= 0.005 and max(gaps) <= 0.03


@pytest.mark.parametrize("zero_stage", (1, 3))
def test_the_proof_knows_that_a_block_waits_where_its_group_is_used(zero_stage):
    """Blocks of four layers, with a group of another dtype for the last of them alone: three layers run while it comes."""
    for seed in range(6):
        draw = random.Random(seed)
        work = make_workload(pp=1, vp=1, microbatches=2, layers=4, order="no_pipeline", zero_stage=zero_stage)
        chunk = work.chunks[0]
        late = [replace(p, dtype="float32", bytes=2 * p.bytes) if p.layer == 3 and p.name.endswith("fc2") else p for p in chunk.parameters]
        work = workload.check(replace(work, chunks=(replace(chunk, parameters=tuple(late)),)))
        # Calls are dear, so coarse blocks are best.
        table = make_table(work, gpu=(draw.uniform(100, 300), draw.uniform(300, 2000)), cpu=None, forward=draw.uniform(100, 400), backward=draw.uniform(100, 400))
        exact = plan(work, table, policy="exact")
        assert exact.metadata.options["proven_gap"] >= -1e-6, seed
        assert exact.predicted.step_time_us <= plan(work, table).predicted.step_time_us * (1 + 1e-9)
