"""Tables around a table: what is uncertain moves, what is missing is drawn, and by how much."""

from statistics import mean, median, stdev

import pytest
from msgspec.structs import replace
from planning_cases import line, make_table, make_workload

from megatron_ext.cost import cost_table as cost
from megatron_ext.cost.missing_ranges import MISSING_CONTENTION, MOST_CALL_US
from megatron_ext.cost.perturbed_table import PerturbedTables, latin_hypercube

WORK = make_workload()
KINDS = ("compute", "gpu", "cpu", "publish", "p2p")


def figures(table: cost.CostTable) -> dict[str, list[float]]:
    """Every figure of a table by the name of its cost."""
    found = {f"routes.{name}": [p.p50_us for p in getattr(table.routes, name).points] for name in ("gpu", "cpu")}
    found["publish.cpu"] = [p.p50_us for p in table.publish.cpu.points]
    found["compute"] = [us for row in table.compute for us in (row.forward_us, row.backward_us)]
    found["contention"] = [row.slowdown for row in table.contention]
    return found


def test_every_part_of_a_distribution_is_drawn_once():
    drawn = latin_hypercube(64, 3, seed=1)
    for column in drawn.T:
        assert abs(mean(column)) < 0.02 and abs(stdev(column) - 1) < 0.05
    assert (drawn == latin_hypercube(64, 3, seed=1)).all() and (drawn != latin_hypercube(64, 3, seed=2)).any()


def test_every_cost_moves_and_none_with_another():
    table = make_table(WORK, contention=(("gpu", "cpu", 1.2),))
    tables = PerturbedTables(table, KINDS)
    given = figures(table)
    for name in given:
        moved = figures(tables.shifted(name, 1.0))
        assert moved[name][0] > given[name][0]
        # Rows that the table lacks are there in every drawn table.
        same = {other for other in given if other not in (name, "contention")}
        assert all(moved[other] == given[other] for other in same)


def test_no_number_leaves_smooth_figures_nearly_as_they_are():
    table = make_table(WORK, contention=(("gpu", "cpu", 1.2),))
    tables = PerturbedTables(table, KINDS)
    same = tables.table([0.0] * len(tables.costs))
    assert figures(same)["routes.gpu"] == pytest.approx(figures(table)["routes.gpu"], rel=0.01)
    assert same.compute == table.compute


def test_a_measured_slowdown_never_becomes_a_speedup_and_stays_plausible():
    def slowdowns(given: float, rough: float = 0.3, measured: str = "gpu") -> list[float]:
        points = tuple(
            replace(p, p50_us=p.p50_us * (1 + rough if n % 2 else 1 - rough))
            for n, p in enumerate(make_table(WORK).routes.gpu.points)
        )
        table = make_table(WORK, contention=((measured, "cpu", given),), cpu=None, publish=None, p2p=None)
        table = replace(table, routes=replace(table.routes, gpu=cost.Curve(points=points)))
        return [each.contention[0].slowdown for each in PerturbedTables(table, KINDS).draw(64)]

    assert 1.0 <= min(slowdowns(1.1)) < 1.05 and 1.2 < max(slowdowns(1.1)) <= 1.3
    assert 1.0 <= min(slowdowns(1.8)) < 1.4 and 1.6 < max(slowdowns(1.8)) <= 1.8
    # Compute beside host copies: a rough table's 2.7 is mostly noise, a smooth table's is not.
    assert median(slowdowns(2.7, measured="compute")) < 1.2 < 2.4 < median(slowdowns(2.7, 0.001, "compute"))


def test_times_of_like_chunks_that_waver_move_towards_their_mean():
    """Of chunks that take equally long one looks slow by chance: a plan that counts on it gains less."""

    def drawn(spread: float) -> tuple[float, float]:
        table = make_table(WORK)
        rows = [replace(row, forward_us=50.0, forward_p95_us=50.0 * spread) for row in table.compute]
        rows[0] = replace(rows[0], forward_us=100.0, forward_p95_us=100.0 * spread)
        tables = PerturbedTables(replace(table, compute=tuple(rows)), KINDS).draw(64)
        return tuple(median(each.compute[row].forward_us for each in tables) for row in (0, 1))

    assert drawn(1.01) == pytest.approx((100.0, 50.0), rel=0.03)
    slow, other = drawn(2.0)  # a standard deviation of 42 %
    assert 50.0 < other < slow < 75.0


def test_a_missing_row_of_contention_is_a_range_and_is_said():
    tables = PerturbedTables(make_table(WORK), KINDS)
    slowdowns = [
        row.slowdown
        for table in tables.draw(64)
        for row in table.contention
        if (row.measured, row.busy) == ("gpu", "cpu")
    ]
    assert 1.0 <= min(slowdowns) < 1.05 and 1.8 < max(slowdowns) <= 2.0
    assert sum(by <= 1.3 for by in slowdowns) == pytest.approx(0.8 * len(slowdowns), abs=1)
    assert any("gpu while cpu is busy" in text for text in tables.missing) and MISSING_CONTENTION in tables.costs
    measured = PerturbedTables(make_table(WORK, contention=(("gpu", "cpu", 1.0),)), KINDS)
    assert not any("gpu while cpu is busy" in text for text in measured.missing)


def test_what_does_not_occur_needs_no_row():
    assert PerturbedTables(make_table(WORK, group_overhead=cost.GroupOverhead(call_us=1.0)), ("compute",)).missing == ()


def test_a_missing_time_of_a_call_is_a_range():
    tables = PerturbedTables(make_table(WORK), KINDS)
    drawn = tables.draw(32)
    assert any("group_overhead.call_us" in text for text in tables.missing)
    calls = [table.group_overhead.call_us for table in drawn]
    assert 0 < min(calls) < max(calls) < MOST_CALL_US
    slower = PerturbedTables(make_table(WORK, gpu=(500.0, 1e4)), KINDS)
    assert MOST_CALL_US < slower.with_missing_at(1.0).group_overhead.call_us == pytest.approx(500.0, rel=0.01)


def test_host_memory_that_is_missing_carries_what_one_activity_moves_at_least():
    tables = PerturbedTables(make_table(WORK, cpu=(10.0, 5e3), host_add=line(10.0, 3e3)), KINDS)
    assert any(text.startswith("host_memory, taken as 9.0 GB/s or more") for text in tables.missing)
    assert tables.with_missing_at(0.0).host_memory is None
    rates = [table.host_memory.bytes_per_s for table in tables.draw(32)]
    assert 0.99 * 9e9 < tables.with_missing_at(1.0).host_memory.bytes_per_s < min(rates) < 9.5e9 < 1e11 < max(rates)
    assert not PerturbedTables(make_table(WORK), ("compute", "gpu")).with_missing_at(1.0).host_memory


def test_a_rough_table_spreads_its_silent_figures_too():
    """Compute says nothing of its spread; curves that waver by 30 % say that measuring was rough."""
    smooth = make_table(WORK)
    points = tuple(
        replace(point, p50_us=point.p50_us * (1.3 if number % 2 else 0.7))
        for number, point in enumerate(smooth.routes.gpu.points)
    )
    rough = replace(smooth, routes=cost.Routes(gpu=cost.Curve(points=points)), publish=cost.Publish(), p2p=())

    def spread(table) -> float:
        tables = PerturbedTables(table, KINDS).draw(64)
        return stdev(each.compute[0].forward_us for each in tables) / table.compute[0].forward_us

    assert spread(smooth) < 0.1 < 0.2 < spread(rough)


def test_spread_of_samples_counts():
    def spread(p95: float, samples: int) -> float:
        table = make_table(WORK)
        points = tuple(replace(p, p95_us=p.p50_us * p95, samples=samples) for p in table.routes.gpu.points)
        rough = replace(table, routes=replace(table.routes, gpu=cost.Curve(points=points)))
        return stdev(each.routes.gpu.points[5].p50_us for each in PerturbedTables(rough, KINDS).draw(64))

    assert spread(1.01, 1) < spread(1.5, 16) < spread(1.5, 1)


def test_every_part_of_a_table_that_holds_times_moves():
    """A part that is added to the table and forgotten here would be taken as known exactly."""
    some = make_table(WORK, cpu=None).routes.gpu
    table = make_table(WORK, contention=(("gpu", "cpu", 1.2),))
    curves = ("reduce", "optimizer", "host_add", "host_step", "device_step")
    times = dict.fromkeys(curves, some) | {"group_overhead": cost.GroupOverhead(call_us=1.0)}
    times |= {"host_memory": cost.HostMemory(bytes_per_s=1e11), "launches": cost.Launches(reduce_us=1.0, tensor_us=1.0)}
    table = replace(table, routes=cost.Routes(**dict.fromkeys(cost.Routes.__struct_fields__, some)), **times)
    compute = tuple(replace(row, forward_launch_us=1.0, backward_launch_us=1.0) for row in table.compute)
    table = replace(table, publish=cost.Publish(cpu=some, nvme=some, internode=some), compute=compute)
    table = replace(table, experts=cost.ExpertCurves(ranks=2, gpu=some, reduce=some))
    drawn = PerturbedTables(table, cost.KINDS).draw(1)[0]
    # The last two: no iteration contains them.
    constant = {"schema_version", "kind", "metadata", "topology", "all_reduce", "set_up"}
    for name in set(table.__struct_fields__) - constant:
        assert getattr(drawn, name) != getattr(table, name), name
    for name in cost.Routes.__struct_fields__:
        assert getattr(drawn.routes, name) != some, name
