"""Workloads at the edge of what can be planned: nothing to gather, layers without parameters, no room for padding."""

import pytest
from edge_workloads import ONE, parameters, work_of
from msgspec.structs import replace
from parallel_sizes import sized
from planning_cases import make_table, make_workload

from megatron_ext.cost import cost_table as cost
from megatron_ext.formats.errors import InputError
from megatron_ext.planner import plan, policies
from megatron_ext.schedule.footprint import device_peaks
from megatron_ext.workload import workload


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
        replace(
            made,
            limits=workload.Limits(
                whole_parameter_bytes=workload.group_bytes(made.chunks[0].parameters, made.parallel)
            ),
        )
    )
    table = make_table(work)
    for policy in ("hybrid", "all-gpu", "random:0", "random:1"):
        assert max(device_peaks(plan(work, table, policy=policy))) <= work.limits.whole_parameter_bytes
    with pytest.raises(InputError, match="policy = 'share-50': does not keep the limits: limits.whole_parameter_bytes"):
        plan(work, table, policy="share-50")


def test_what_later_layers_borrow_needs_room_beside_them():
    own = parameters(1000, 1000, 1000)
    group = workload.group_bytes(own[:1], sized(dp=2, microbatches=1))
    work = work_of(
        [(replace(own[0], borrowed_by=(2,)), *own[1:])],
        ("e", "t", "o"),
        limits=workload.Limits(whole_parameter_bytes=group + 100),
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


def test_if_nothing_can_be_planned_the_reason_is_that_of_the_search(monkeypatch):
    def refusing(reason: str):
        def refuse(*_):
            raise InputError(reason)

        return refuse

    monkeypatch.setattr(policies, "BASELINES", {"all-gpu": (set(), refusing("the rule"))})
    monkeypatch.setattr(policies, "search", refusing("the search"))
    work = make_workload()
    with pytest.raises(InputError, match="the search"):
        plan(work, make_table(work))
