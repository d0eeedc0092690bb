"""Workloads at the edge of what can be planned: nothing to gather, layers without parameters, no room for padding."""

import pytest
from msgspec.structs import replace
from planning_cases import line, make_table, make_workload, with_host_cpu

from megatron_ext.bounds.lower_bound import lower_bound
from megatron_ext.cost import cost_table as cost
from megatron_ext.formats.errors import InputError
from megatron_ext.planner import plan
from megatron_ext.schedule.footprint import device_peaks
from megatron_ext.simulator.timing import Timing
from megatron_ext.workload import workload

ONE = dict(pp=1, vp=1, order="no_pipeline", microbatches=1)


def parameters(*numels, layers=None):
    return tuple(
        workload.Parameter(
            name=f"p{index}",
            shape=(numel,),
            dtype="bfloat16",
            bytes=2 * numel,
            layer=layers[index] if layers else index,
        )
        for index, numel in enumerate(numels)
    )


def work_of(chunks, kinds=(), limits=None, **shape):
    made = make_workload(**shape)
    chunks = tuple(replace(chunk, parameters=own, layer_kinds=kinds) for chunk, own in zip(made.chunks, chunks))
    return workload.check(replace(made, chunks=chunks, **({"limits": limits} if limits else {})))


@pytest.mark.parametrize("zero_stage", [1, 3])
@pytest.mark.parametrize("policy", ["hybrid", "pipeswitch", "exact", "all-gpu", "random:3"])
def test_a_first_layer_without_parameters(policy, zero_stage):
    work = work_of(
        [parameters(4096, 64, layers=[1, 2])], ("embedding", "transformer", "output"), zero_stage=zero_stage, **ONE
    )
    assert plan(work, make_table(work), policy=policy).predicted.iteration_time_us >= 300


@pytest.mark.parametrize("policy", ["hybrid", "exact", "random:0"])
def test_nothing_to_gather_and_no_route(policy):
    work = work_of([()], ("embedding", "transformer"), **ONE)
    assert plan(work, make_table(work, gpu=None, cpu=None), policy=policy).groups == ()


@pytest.mark.parametrize(
    "chunks, shape",
    [
        ([parameters(4096, layers=[1])], ONE | {"kinds": ("embedding", "transformer")}),
        ([(), parameters(4096)], dict(pp=2, vp=1, order="1f1b", microbatches=2)),
        ([()], ONE),
    ],
)
def test_the_bound_knows_that_gradients_may_be_reduced_beside_layers_without_any(chunks, shape):
    work = work_of(chunks, **shape)
    table = make_table(work, reduce=line(30, 1e4))
    assert plan(work, table).predicted.iteration_time_us >= lower_bound(work, Timing(work, table)) * (1 - 1e-9)


def test_the_bound_knows_a_drive_without_a_host_copy():
    """Its reads are not beside PCIe copies that were never measured."""
    work = work_of([parameters(*[1 << 16] * 8)], limits=workload.Limits(nvme_slots=3), **ONE)
    table = make_table(
        work,
        gpu=(1, 500),
        cpu=None,
        nvme=(1, 500),
        forward=1,
        backward=1,
        publish=(0.1, 1e6),
        topology=cost.Topology(nic_shares_pcie=True),
    )
    assert plan(work, table).predicted.iteration_time_us >= lower_bound(work, Timing(work, table)) * (1 - 1e-9)


def test_the_bound_knows_groups_that_padding_carries_past_the_last_size():
    work = work_of([parameters(65 * 128)], **ONE)
    points = tuple(cost.Point(size_bytes=size, p50_us=us) for size, us in ((1024, 1e4), (16384, 10001.0)))
    table = replace(
        make_table(work, cpu=None, forward=1, backward=1), routes=cost.Routes(gpu=cost.Curve(points=points))
    )
    assert plan(work, table).predicted.iteration_time_us >= lower_bound(work, Timing(work, table)) * (1 - 1e-9)


def test_the_bound_and_the_engine_count_replicas_on_the_same_machine():
    work = make_workload(pp=2, vp=1, dp=3, order="1f1b", microbatches=4, gpus_per_node=2)
    table = with_host_cpu(make_table(work), 1.0)
    rows = tuple(
        cost.Compute(pp_rank=rank, model_chunk_id=0, forward_us=us, backward_us=2 * us)
        for rank, us in enumerate((10.0, 100.0))
    )
    table = replace(table, compute=rows)
    assert plan(work, table).predicted.iteration_time_us >= lower_bound(work, Timing(work, table)) * (1 - 1e-9)


def test_sizes_of_a_hierarchical_curve_do_not_matter_without_a_hierarchy():
    work = make_workload(dp=4)
    table = make_table(work)
    gpu = replace(
        table.routes.gpu, algorithms={"hierarchical": (cost.Point(size_bytes=1, p50_us=5.0), *table.routes.gpu.points)}
    )
    assert (
        plan(work, replace(table, routes=replace(table.routes, gpu=gpu)), policy="all-cpu").predicted.iteration_time_us
        > 0
    )


def test_room_for_stock_buckets_and_not_for_more_padding():
    made = make_workload(microbatches=2, pp=1, vp=1, order="no_pipeline")
    work = workload.check(
        replace(made, limits=workload.Limits(whole_parameter_bytes=workload.group_bytes(made.chunks[0].parameters, 2)))
    )
    table = make_table(work)
    for policy in ("hybrid", "all-gpu", "random:0", "random:1"):
        assert max(device_peaks(plan(work, table, policy=policy))) <= work.limits.whole_parameter_bytes
    with pytest.raises(InputError, match="policy = 'share-50': does not keep the limits: limits.whole_parameter_bytes"):
        plan(work, table, policy="share-50")


def test_what_later_layers_borrow_needs_room_beside_them():
    own = parameters(1000, 1000, 1000)
    work = work_of(
        [(replace(own[0], borrowed_by=(2,)), *own[1:])],
        ("e", "t", "o"),
        limits=workload.Limits(whole_parameter_bytes=workload.group_bytes(own[:1], 2) + 100),
        zero_stage=3,
        **ONE,
    )
    with pytest.raises(InputError, match="layer 1 alone needs 4096 bytes, 1948 bytes short"):
        plan(work, make_table(work))


@pytest.mark.parametrize(
    "limits, curves, policy, said",
    [
        (
            dict(nvme_slots=1, nvme_slot_bytes=512),
            dict(gpu=None, cpu=None, nvme=(1, 10)),
            "random:0",
            "limits.nvme_slot_bytes = 512: cannot fit",
        ),
        (dict(pinned_host_bytes=5000), dict(gpu=None), "random:0", "limits.pinned_host_bytes = 5000: cannot fit"),
        (dict(pinned_host_bytes=0), dict(gpu=None), "hybrid", "limits: the limits .* leave no room for cpu"),
        ({}, dict(gpu=None, cpu=None), "hybrid", "routes: no route has points"),
    ],
)
def test_what_cannot_fit_names_the_limit(limits, curves, policy, said):
    work = work_of([parameters(5000, 100)], limits=workload.Limits(**limits), **ONE)
    with pytest.raises(InputError, match=said):
        plan(work, make_table(work, **curves), policy=policy)


def test_exact_proves_no_more_than_is_so_where_gradients_are_reduced():
    """Reducing beside the last backward: what the model proves lies below what is found."""
    from megatron_ext.planner.exact import EXACT, solve

    work = make_workload(pp=1, vp=1, order="no_pipeline", microbatches=2, layers=4)
    table = make_table(work, cpu=None, reduce=line(1, 2e3), forward=100, backward=400)
    known = plan(work, table, policy="all-gpu")
    _, found, proven = solve(work, Timing(work, table), ("gpu",), known, known.predicted.iteration_time_us, EXACT)
    assert proven <= found < known.predicted.iteration_time_us


def test_two_routes_over_one_link_are_not_mixed_where_that_only_slows_both():
    """A fairly shared link: the copy is the faster way, and an all-gather beside it takes from it."""
    work = make_workload(
        pp=2, vp=1, order="1f1b", layers=12, zero_stage=3, whole_parameter_bytes=396_000
    )  # room for four layers
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
