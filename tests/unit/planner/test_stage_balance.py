"""Placing layers on stages: against exhaustion, within limits, in Megatron's own words."""

import random
from itertools import combinations_with_replacement, islice

import pytest
from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
from msgspec.structs import replace
from planning_cases import make_table, make_workload

from megatron_ext.cost import cost_table as cost
from megatron_ext.formats.errors import InputError
from megatron_ext.planner.evaluate import evaluate
from megatron_ext.planner.stage_balance import StageCosts, balance, place, stage_costs
from megatron_ext.workload import workload


def gpt(*, layers=2, transformer=(100.0, 200.0), embedding=(20.0, 10.0), output=(150.0, 300.0), **shape):
    """A model of equal transformer layers, an embedding and an output layer, with costs by kind of layer."""
    work = make_workload(layers=layers, **shape)
    chunks = []
    for chunk in work.chunks:
        kinds = ["transformer"] * layers
        parameters = [replace(p, name=f"decoder.{p.name}") for p in chunk.parameters]
        if chunk is work.chunks[0]:
            kinds.insert(0, "embedding")
            word = workload.Parameter(name="embedding.word", shape=(64, 64), dtype="bfloat16", bytes=8192, layer=0)
            parameters = [word, *(replace(p, layer=p.layer + 1) for p in parameters)]
        if chunk is work.chunks[-1]:
            kinds.append("output")
            name = "output_layer.weight"
            parameters.append(
                workload.Parameter(name=name, shape=(64, 64), dtype="bfloat16", bytes=8192, layer=len(kinds) - 1)
            )
        chunks.append(replace(chunk, parameters=tuple(parameters), layer_kinds=tuple(kinds)))
    work = workload.check(replace(work, chunks=tuple(chunks)))
    rows = {"transformer": transformer, "embedding": embedding, "output": output}
    compute = tuple(cost.Compute(layer_kind=kind, forward_us=f, backward_us=b) for kind, (f, b) in rows.items())
    return work, cost.check(replace(make_table(work), compute=compute))


def placed(work, table, counts) -> workload.Workload:
    """``work`` with ``counts`` layers on its stages."""
    layers, chunks = iter(StageCosts(work, table).layers), []
    for chunk, count in zip(work.chunks, counts):
        own = list(enumerate(islice(layers, count)))
        parameters = [replace(p, name=f"{at}.{p.name}", layer=at) for at, layer in own for p in layer.parameters]
        kinds = tuple(layer.kind for _, layer in own)
        chunks.append(replace(chunk, parameters=tuple(parameters), layer_kinds=kinds))
    return workload.check(replace(work, chunks=tuple(chunks)))


def by_exhaustion(num_layers: int, stages: int, cost_of) -> float:
    """The fastest slowest stage of all placements."""
    return min(
        max(cost_of(a, b) for a, b in zip((0, *cuts), (*cuts, num_layers)))
        for cuts in combinations_with_replacement(range(num_layers + 1), stages - 1)
    )


@pytest.mark.parametrize("seed", range(40))
def test_no_placement_has_a_faster_slowest_stage(seed):
    draw = random.Random(seed)
    shape = draw.choice((dict(pp=2, vp=1, order="1f1b"), dict(pp=2, vp=2), dict(pp=4, vp=1, order="1f1b")))
    limits = {"whole_parameter_bytes": draw.choice((None, 120_000, 260_000, 500_000))}
    us = lambda: (draw.uniform(1, 300), draw.uniform(1, 600))
    try:
        work, table = gpt(
            layers=draw.choice((1, 2)),
            transformer=us(),
            embedding=us(),
            output=us(),
            zero_stage=draw.choice((1, 3)),
            **shape,
            **limits,
        )
        cost_of = StageCosts(work, table)
        layers = cost_of.layers
        best = by_exhaustion(len(layers), len(work.chunks), cost_of)
        found = balance(work, table)
    except InputError:
        assert best == float("inf")
        return
    assert max(found.stage_us) == pytest.approx(best)
    assert max(found.stage_us) <= max(found.present_us) * (1 + 1e-9)
    assert sum(found.counts) == len(layers)


def test_random_costs_of_single_layers_are_placed_as_by_exhaustion():
    draw = random.Random(7)
    for _ in range(100):
        us = [draw.choice((0.0, 1.0, 2.0, 7.5)) for _ in range(draw.randint(1, 7))]
        stages = draw.randint(1, 5)
        cost_of = lambda first, end, us=us: sum(us[first:end])
        counts = place(len(us), stages, cost_of)
        assert counts is not None and sum(counts) == len(us)
        assert max(stage_costs(counts, cost_of)) == pytest.approx(by_exhaustion(len(us), stages, cost_of))


@pytest.mark.parametrize("shape", [dict(pp=2, vp=2, layers=2), dict(pp=4, vp=1, layers=3, order="1f1b")])
def test_megatron_reads_the_layout_as_it_was_meant(shape):
    work, table = gpt(**shape)
    found = balance(work, table)
    layout = PipelineParallelLayerLayout.from_str(found.layout, work.parallel.pp)
    total = shape["layers"] * len(work.chunks)
    layout.validate_layer_layout(num_layers=total, mtp_num_layers=None)
    assert layout.virtual_pipeline_model_parallel_size == work.parallel.vp
    for chunk in placed(work, table, found.counts).chunks:
        of_megatron = layout.layout[chunk.pp_rank][chunk.model_chunk_id]
        kinds = {LayerType.embedding: "embedding", LayerType.decoder: "transformer", LayerType.loss: "output"}
        assert tuple(kinds[kind] for kind in of_megatron) == chunk.layer_kinds


def test_an_expensive_output_layer_gives_its_stage_fewer_layers_and_the_iteration_gets_faster():
    work, table = gpt(pp=4, vp=1, layers=3, order="1f1b", microbatches=8, output=(200.0, 400.0))
    found = balance(work, table)
    assert found.layout == "Et*3|t*4|t*4|tL"
    before, after = (evaluate(each, table).iteration_time_us for each in (work, placed(work, table, found.counts)))
    assert max(found.present_us) == 3 * 300 + 600 and max(found.stage_us) == 1200
    assert after < 0.9 * before


def test_a_limit_moves_layers_to_stages_with_headroom():
    """At zero stage 1 a rank holds all of its parameters: no more than four layers and the embedding have room."""
    work, table = gpt(pp=2, vp=1, layers=3, order="1f1b", output=(900.0, 1800.0))
    layer = max(layer.bytes for layer in StageCosts(work, table).layers)
    assert balance(work, table).counts == (7, 1)
    tight = replace(work, limits=workload.Limits(whole_parameter_bytes=4 * layer + 8192))
    assert balance(tight, table).counts == (5, 3)
    with pytest.raises(InputError, match="whole_parameter_bytes"):
        balance(replace(work, limits=workload.Limits(whole_parameter_bytes=2 * layer)), table)


def test_a_workload_without_kinds_of_layers_is_refused():
    work = make_workload()
    with pytest.raises(InputError, match="layer_kinds"):
        balance(work, make_table(work))
