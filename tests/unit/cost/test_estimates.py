"""Look-ups in a cost table, contended look-ups, and the compute of a chunk."""

import pytest

from megatron_ext.cost.cost_table import Compute, Contention, CostTable, Curve, Point, Routes, check
from megatron_ext.cost.curve import lookup
from megatron_ext.cost.estimates import Costs
from megatron_ext.formats.errors import InputError


def points(*pairs, p95=None):
    return tuple(Point(size_bytes=size, p50_us=us, p95_us=us * p95 if p95 else None) for size, us in pairs)


def table(**fields):
    return check(CostTable(schema_version=2, kind="cost_table", **fields))


GPU = points((1000, 10.0), (2000, 20.0), (4000, 30.0))


def test_linear_in_bytes_between_points():
    assert lookup(GPU, 1500).us == pytest.approx(15)
    assert lookup(GPU, 3000).us == pytest.approx(25)
    assert lookup(GPU, 4000).us == 30
    assert lookup(Curve(points=GPU), 1000).us == 10


def test_interval_holds_the_middle_and_the_spread_of_samples():
    estimate = lookup(points((1000, 10.0), (2000, 20.0), (4000, 40.0), p95=1.5), 2000)
    assert estimate.low_us <= estimate.us <= estimate.high_us
    assert estimate.high_us == pytest.approx(30)  # p95 was half above the median, of one sample
    many = tuple(
        Point(size_bytes=size, p50_us=us, p95_us=2 * us, samples=100)
        for size, us in ((1000, 10.0), (2000, 20.0), (4000, 40.0))
    )
    assert lookup(many, 2000).high_us == pytest.approx(20 * 1.2)


@pytest.mark.parametrize("size", [0, 999, 4001, 1 << 40])
def test_outside_the_range_is_an_error_unless_asked_for(size):
    with pytest.raises(
        InputError, match=rf"t\.json: routes\.gpu\.size_bytes = {size}: outside the measured range 1000 to 4000"
    ):
        lookup(GPU, size, what="routes.gpu", file="t.json")
    estimate = lookup(GPU, size, extrapolate=True)
    assert estimate.extrapolated and 0 <= estimate.low_us <= estimate.us <= estimate.high_us


def test_extrapolation_goes_on_along_the_last_segment():
    assert lookup(GPU, 8000, extrapolate=True).us == pytest.approx(50)
    falling = points((1000, 30.0), (2000, 20.0))
    assert lookup(falling, 8000, extrapolate=True).us == pytest.approx(80)  # noise is not gone on with


def test_no_points_is_an_error():
    with pytest.raises(InputError, match="routes.nvme: has no points"):
        Costs(table(routes=Routes(gpu=Curve(points=GPU)))).estimate("routes.nvme", 1000)


def test_best_algorithm_by_size_and_its_name():
    curve = Curve(
        algorithms={"tree": points((100, 5.0), (1000, 50.0)), "ring": points((100, 20.0), (1000, 30.0), (2000, 40.0))}
    )
    assert lookup(curve, 100)[0::3] == (5.0, "tree")
    assert lookup(curve, 1000)[0::3] == (30.0, "ring")
    assert lookup(curve, 1500).algorithm == "ring"  # tree was not measured there
    assert lookup(curve, 1500, extrapolate=True).algorithm == "ring"


def test_costs_offers_only_what_was_measured():
    costs = Costs(table(routes=Routes(gpu=Curve(points=GPU), cpu=Curve())))
    assert costs.offers("routes.gpu") and not costs.offers("routes.cpu") and not costs.offers("publish.cpu")
    assert costs.estimate("routes.gpu", 1500).us == pytest.approx(15)
    for curve in ("publish.cpu", "reduce", "optimizer", "p2p"):
        with pytest.raises(InputError, match=curve):
            costs.estimate(curve, 1000)


def test_slowdown_by_size_and_contended_gather():
    rows = (
        Contention(measured="gpu", busy="cpu", slowdown=1.2, size_bytes=1000),
        Contention(measured="gpu", busy="cpu", slowdown=1.4, size_bytes=3000),
        Contention(measured="gpu", busy="compute", slowdown=2.0),
        Contention(measured="cpu", busy="gpu", slowdown=0.9),
    )
    costs = Costs(table(routes=Routes(gpu=Curve(points=GPU)), contention=rows))
    assert costs.slowdown("gpu", "cpu", 2000) == pytest.approx(1.3)
    assert costs.slowdown("gpu", "cpu", 1) == 1.2 and costs.slowdown("gpu", "cpu", 10**9) == 1.4
    assert costs.slowdown("gpu", "cpu") == 1.4
    assert costs.slowdown("cpu", "gpu") == 1.0  # never a speed-up
    assert costs.slowdown("gpu", "nvme") == 1.0
    alone = costs.estimate("routes.gpu", 1000)
    assert costs.while_busy("gpu", 1000, ["cpu"], alone).us == pytest.approx(12)
    both = costs.while_busy("gpu", 1000, ["cpu", "compute"], alone)
    assert both.us == pytest.approx(10 * (1 + 0.2 + 1.0)) and both.low_us <= both.us <= both.high_us
    with pytest.raises(InputError, match="contention: not measured: gpu while nvme is busy"):
        costs.while_busy("gpu", 1000, ["nvme"], alone)


def test_compute_by_place_wins_over_layer_kinds():
    costs = Costs(
        table(
            compute=(
                Compute(layer_kind="embedding", forward_us=1, backward_us=2),
                Compute(layer_kind="transformer", forward_us=10, backward_us=20),
                Compute(pp_rank=1, model_chunk_id=0, forward_us=33, backward_us=66),
            )
        )
    )
    assert costs.layer_us(0, 0, ("embedding", "transformer")) == [(1, 2), (10, 20)]
    assert costs.layer_us(1, 0, ("embedding", "transformer")) == [pytest.approx((3, 6)), pytest.approx((30, 60))]
    assert costs.layer_us(1, 0, num_layers=3) == [(11, 22)] * 3
    # Of a layer without a row: what the others leave, and where these take all, as much as they.
    assert costs.layer_us(1, 0, ("transformer", "output"))[1] == pytest.approx((23, 46))
    assert (
        costs.layer_us(1, 0, ("transformer", "transformer", "transformer", "transformer", "output"))
        == [pytest.approx((6.6, 13.2))] * 5
    )
    with pytest.raises(InputError, match="pp_rank 0, model_chunk_id 1, and none for layer_kind output"):
        costs.layer_us(0, 1, ("transformer", "output"))
    with pytest.raises(InputError, match="names no layer_kinds"):
        costs.layer_us(0, 1)


def test_estimates_are_cached_by_size():
    costs = Costs(table(routes=Routes(gpu=Curve(points=GPU))))
    assert costs.estimate("routes.gpu", 1500) is costs.estimate("routes.gpu", 1500)


def test_a_step_costs_what_its_layers_do_not_hold():
    rows = (
        Compute(layer_kind="transformer", forward_us=10, backward_us=20),
        Compute(layer_kind="step", forward_us=3, backward_us=4),
    )
    costs = Costs(table(compute=rows))
    assert costs.layer_us(0, 0, ["transformer"] * 3) == [(13, 20), (10, 20), (10, 24)]
    whole = Compute(pp_rank=0, model_chunk_id=0, forward_us=50, backward_us=60)  # measured with everything in it
    assert Costs(table(compute=(*rows, whole))).layer_us(0, 0, ["transformer"]) == [(50, 60)]
