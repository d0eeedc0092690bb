"""What a verdict says: three answers, with an interval that holds what is not known, against what a user would run."""

import msgspec
import pytest
from msgspec.structs import replace
from parallel_sizes import sized
from planning_cases import WHOLE, make_table, make_workload

from megatron_ext.cost import cost_table as cost
from megatron_ext.cost import hardware_sheet as sheets
from megatron_ext.cost.estimated_table import estimate
from megatron_ext.planner import baselines, plan, verdict, within_memory
from megatron_ext.planner.gain_interval import (
    MODEL_ERROR,
    WIDTH,
    GainOnTables,
    dominant_cost,
    gain_interval,
    tables_to_draw,
)
from megatron_ext.planner.gather_search import search
from megatron_ext.planner.stock import OVERLAPPED, SYNCHRONOUS, stock_schedule
from megatron_ext.planner.verdict import CANNOT_TELL, HELPS, HELPS_NOT, answer_of_gain, conclusion_of
from megatron_ext.simulator.simulation import simulate
from megatron_ext.simulator.timing import Timing
from megatron_ext.workload.gpt_shapes import GptShape, MicroBatch, gpt_workload
from megatron_ext.workload.workload import Limits

ALL_PAIRS = tuple(
    (measured, busy, 1.0)
    for measured in cost.KINDS
    for busy in ("compute", "gpu", "cpu", "publish")
    if measured != busy
)
"""Contention that was measured everywhere, and found nowhere."""
CALLS = cost.GroupOverhead(call_us=0.5)
MEMORY = cost.HostMemory(bytes_per_s=1e12)
BATCH = MicroBatch(1024, 1)


def judged(work, table):
    return verdict(work, table, plan(work, table))


def rough(table, spread: float):
    """Every point's samples waver by ``spread``."""

    def curve(given):
        return replace(given, points=tuple(replace(p, p95_us=p.p50_us * (1 + spread)) for p in given.points))

    routes = cost.Routes(gpu=curve(table.routes.gpu), cpu=curve(table.routes.cpu))
    return replace(table, routes=routes, publish=cost.Publish(cpu=curve(table.publish.cpu)))


@pytest.mark.parametrize(
    "low, high, surely, answer",
    [
        (0.011, 0.3, 0.001, HELPS),
        (0.011, 0.3, -0.001, CANNOT_TELL),
        (0.009, 0.3, 0.008, CANNOT_TELL),
        (-0.2, 0.02, -0.3, CANNOT_TELL),
        (-0.2, 0.009, -0.3, HELPS_NOT),
    ],
)
def test_the_interval_decides(low, high, surely, answer):
    assert answer_of_gain(low, high, surely) == answer


def test_a_large_gain_helps_and_none_does_not():
    work = make_workload()
    hopeless = judged(work, make_table(work, gpu=(1e-6, 1e12), cpu=(1000.0, 10.0)))
    assert hopeless.figures["helps"] is False and "verdict: does not help" in hopeless.text
    promising = judged(work, make_table(work, gpu=(50.0, 50.0), cpu=(5.0, 2000.0)))
    assert promising.figures["helps"] is True and promising.figures["gain"] > 0.2
    assert "verdict: helps" in promising.text


def test_the_same_plan_gains_exactly_nothing():
    work = make_workload()
    table = make_table(work)
    stock = stock_schedule(work)
    assert gain_interval(work, table, stock, stock)[:4] == (0.0, 0.0, 0.0, 0.0)
    # Under other names and in other objects, too.
    planned = plan(work, table, policy="all-gpu")
    figures = verdict(work, table, planned).figures
    assert (figures["gain"], figures["gain_low"], figures["gain_high"]) == (0.0, 0.0, 0.0)
    assert figures["answer"] == HELPS_NOT


def test_costs_that_both_plans_pay_alike_fall_out():
    """Compute by 30 % off moves both plans: the gain of a plan that hides all gathers stays near what it was."""
    work = make_workload()
    table = make_table(work, gpu=(50.0, 50.0), cpu=(5.0, 2000.0), contention=ALL_PAIRS, group_overhead=CALLS)
    planned, stock = plan(work, table), stock_schedule(work)
    wide = replace(table, compute=tuple(replace(row, forward_p95_us=row.forward_us * 1.5) for row in table.compute))
    sure, unsure = (gain_interval(work, given, planned, stock) for given in (table, wide))
    # Forwards waver by 15 % each: unpaired, the gain of 70 % would waver by more than 10 points.
    assert unsure.high - unsure.low < sure.high - sure.low + 0.1


def small_gain(spread: float = 0.0):
    """A plan with a small predicted gain; every figure by a factor with this spread at two samples."""
    work = make_workload()
    table = make_table(
        work, gpu=(10.0, 800.0), cpu=(5.0, 2000.0), publish=(0.1, 1e6), contention=ALL_PAIRS, group_overhead=CALLS
    )
    return work, rough(table, spread) if spread else table


def test_rough_costs_cannot_tell_of_a_small_gain():
    work, table = small_gain(5.0)
    figures = judged(work, table).figures
    assert 0 < figures["gain_on_table"] < 0.3 and figures["answer"] == CANNOT_TELL


def test_a_missing_row_of_contention_widens_the_interval_and_is_said():
    work = make_workload()
    costs = {"gpu": (10.0, 300.0), "cpu": (5.0, 300.0), "publish": (1.0, 600.0), "contention": ALL_PAIRS}
    table = make_table(work, **costs, group_overhead=CALLS, host_memory=MEMORY)
    planned, stock = plan(work, table), stock_schedule(work)
    without = replace(table, contention=tuple(row for row in table.contention if row.busy == "compute"))
    known, unknown = (gain_interval(work, given, planned, stock) for given in (table, without))
    assert unknown.high - unknown.low > known.high - known.low and unknown.low < known.low
    assert known.on_table == pytest.approx(unknown.on_table)
    assert not known.missing and any("cpu while gpu is busy" in text for text in unknown.missing)
    assert "cpu while gpu is busy" in verdict(work, without, planned).text


def test_cannot_tell_names_the_cost_that_matters():
    """Only publishing is rough, and the plan waits for it."""
    work = make_workload()
    table = make_table(
        work, gpu=(10.0, 300.0), cpu=(1.0, 3000.0), publish=(1.0, 250.0), contention=ALL_PAIRS, group_overhead=CALLS
    )
    publish = cost.Curve(points=tuple(replace(p, p95_us=p.p50_us * 4) for p in table.publish.cpu.points))
    table = replace(table, publish=cost.Publish(cpu=publish))
    planned = plan(work, table)
    assert dominant_cost(work, table, planned, stock_schedule(work)) == "publish.cpu"
    answer = verdict(work, table, planned)
    assert answer.figures["answer"] == CANNOT_TELL and answer.figures["measure_better"] == "publish.cpu"
    assert answer.text.endswith("cannot tell from these costs. Measure better: publish.cpu")


def test_cannot_tell_names_no_cost_where_the_simulator_s_own_error_leaves_more_open():
    """On exact costs: to measure one better tells nothing."""
    work = make_workload()
    table = make_table(
        work, gpu=(3.0, 2000.0), cpu=(1.0, 4000.0), publish=(0.1, 1e6), contention=ALL_PAIRS, group_overhead=CALLS
    )
    answer = verdict(work, table, plan(work, table))
    assert answer.figures["answer"] == CANNOT_TELL and answer.figures["measure_better"] is None
    assert answer.figures["gain_low"] > 0.02 - 1.1 * WIDTH * MODEL_ERROR
    assert answer.text.endswith(
        "The simulator's own error is larger than that of the costs: measure iterations of both"
    )


def test_a_plan_that_luck_has_chosen_gains_less_on_other_tables():
    """Host copies of one size looked fast by luck: less is expected than the table says."""
    work, table = small_gain()
    layer = work.chunks[0].bytes // 2
    points = tuple(
        replace(point, p50_us=point.p50_us * (0.4 if layer / 4 < point.size_bytes <= layer else 1.0))
        for point in table.routes.cpu.points
    )
    lucky = replace(table, routes=replace(table.routes, cpu=cost.Curve(points=points)))
    planned = plan(work, lucky)
    found, other = (gain_interval(work, given, planned, stock_schedule(work)) for given in (lucky, table))
    assert found.on_table > other.on_table and found.low < found.gain < found.on_table


def test_a_gain_outside_its_interval_is_explained_and_another_one_is_expected():
    """Without rows of contention the table says that links never disturb each other."""
    work = make_workload(
        pp=1, vp=1, order="no_pipeline", layers=4, zero_stage=3, microbatches=2, whole_parameter_bytes=420_000
    )
    known = [row for row in ALL_PAIRS if not {row[0], row[1]} <= {"gpu", "cpu", "publish"}]
    costs = {"gpu": (1.0, 100.0), "cpu": (1.0, 100.0), "publish": (0.1, 1e6), "forward": 20.0, "backward": 40.0}
    answer = judged(work, make_table(work, **costs, contention=known, group_overhead=CALLS))
    figures = answer.figures
    assert figures["gain_low"] < figures["gain"] < figures["gain_high"] < figures["gain_on_table"]
    assert f": {figures['gain']:.2%}, {figures['gain_low']:.2%} to {figures['gain_high']:.2%}" in answer.text
    said = f"{figures['gain_on_table']:.2%}, more than expected: the plan was chosen because it is fast on it, and"
    assert said in answer.text
    assert figures["gain_us"] == pytest.approx(figures["gain"] * figures["compared_with_us"])
    sure = judged(work, make_table(work, **costs, contention=ALL_PAIRS, group_overhead=CALLS, host_memory=MEMORY))
    assert "more than expected" not in sure.text


def test_zero_stage_1_is_compared_with_stock_and_split():
    work, table = small_gain()
    figures = judged(work, table).figures
    stock_us = simulate(work, Timing(work, table), stock_schedule(work)).iteration_time_us
    assert figures["compared_with"] == OVERLAPPED and figures["compared_with_us"] == stock_us
    assert figures["stock_us"] == stock_us and figures["layers_anew_us"] is None
    assert figures["gain_of_timing"] >= 0
    assert figures["gain_on_table"] == pytest.approx(figures["gain_of_timing"] + figures["gain_of_routes"])


def test_what_megatron_s_own_option_gains_is_said_and_is_no_gain_of_the_plan():
    """1F1B is faster without --overlap-param-gather, interleaved stages with it."""
    work = make_workload(pp=4, vp=1, microbatches=4, order="1f1b")
    table = make_table(work, gpu=(100.0, 1e12), cpu=None, publish=None, contention=ALL_PAIRS, group_overhead=CALLS)
    planned = plan(work, table)
    answer, measured = (verdict(work, table, planned, as_trained=trained) for trained in (False, True))
    ours, by_option = answer.figures, answer.figures["stock_by_option_us"]
    assert ours["compared_with"] == SYNCHRONOUS and ours["compared_with_us"] == min(by_option.values())
    assert by_option[OVERLAPPED] > by_option[SYNCHRONOUS] + 250
    option = 1 - by_option[SYNCHRONOUS] / by_option[OVERLAPPED]
    hint = f"hint: leaving --overlap-param-gather out gains {option:.2%} by itself"
    assert hint in answer.text and "which is not counted as a gain of the plan" in answer.text
    assert hint in measured.text and "which is in the gain above" in measured.text
    assert measured.figures["compared_with"] == OVERLAPPED
    assert measured.figures["gain_on_table"] == pytest.approx(1 - (1 - ours["gain_on_table"]) * (1 - option))
    assert "hint: Megatron's own --overlap-param-gather gains" in judged(*small_gain()).text


def test_zero_stage_3_is_compared_with_the_best_of_all_gathers_alone():
    work = make_workload(zero_stage=3, whole_parameter_bytes=420_000)
    table = make_table(work, gpu=(5.0, 1000.0), cpu=(3.0, 900.0), forward=40.0, backward=80.0)
    planned = plan(work, table)
    answer = verdict(work, table, planned)
    figures, baselines = answer.figures, planned.predicted.baselines_us
    by_gathers = ("all-gpu", "window-1", "window-2", "urgency", "pipeswitch", "gathers-only")
    assert figures["compared_with_us"] == min(baselines[name] for name in by_gathers if name in baselines)
    assert figures["compared_with_us"] == figures["gathers_only_us"] < figures["layers_anew_us"] == baselines["all-gpu"]
    assert figures["stock_us"] is None and "stock Megatron gathers" not in answer.text
    assert "every layer gathered again" in answer.text and "stock Megatron has no zero stage 3" in answer.text
    assert figures["gain_on_table"] == pytest.approx(figures["gain_of_routes"])


def test_at_zero_stage_3_a_plan_by_all_gathers_alone_gains_nothing_over_these():
    work = make_workload(zero_stage=3, whole_parameter_bytes=420_000)
    table = make_table(work, gpu=(5.0, 1000.0), cpu=None, publish=None, forward=40.0, backward=80.0)
    planned = plan(work, table)
    slower = replace(planned.predicted, baselines_us={"urgency": 2 * planned.predicted.iteration_time_us})
    figures = verdict(work, table, replace(planned, predicted=slower)).figures
    assert figures["gathers_only"] == "this plan" and figures["answer"] == HELPS_NOT and figures["gain_high"] == 0


def test_a_schedule_without_known_baselines_is_compared_with_the_same():
    work = make_workload(zero_stage=3, whole_parameter_bytes=420_000)
    table = make_table(work, gpu=(5.0, 1000.0), cpu=(3.0, 900.0), forward=40.0, backward=80.0)
    planned = plan(work, table)
    bare = replace(planned, predicted=replace(planned.predicted, baselines_us={}))
    names = ("compared_with", "compared_with_us", "gain_low", "gain_high")
    one, two = (verdict(work, table, given).figures for given in (planned, bare))
    assert [one[name] for name in names] == [two[name] for name in names]


def test_a_verdict_does_not_search_anew_what_the_plan_has_searched(monkeypatch):
    work = make_workload(zero_stage=3, pp=1, vp=1, order="no_pipeline", whole_parameter_bytes=420_000)
    table = make_table(work, gpu=(5.0, 1000.0), cpu=(3.0, 900.0), forward=40.0, backward=80.0)
    planned = plan(work, table)
    best = replace(planned, predicted=replace(planned.predicted, baselines_us={"gathers-only": 1.0}))
    searched = []
    monkeypatch.setattr(baselines, "search", lambda *given, **how: searched.append(given) or search(*given, **how))
    assert verdict(work, table, best).figures["gathers_only"] == "gathers-only" and not searched
    other = replace(table, group_overhead=cost.GroupOverhead(call_us=0.25))
    assert verdict(work, other, best).figures["gathers_only"] == "gathers-only" and len(searched) == 1


def test_nor_does_a_verdict_on_a_plan_within_device_memory(monkeypatch):
    work = make_workload(zero_stage=3, pp=1, vp=1, order="no_pipeline", layers=3, device_bytes=1 << 22)
    table = make_table(work, **WHOLE)
    planned, searched = plan(work, table), []
    monkeypatch.setattr(within_memory, "search", lambda *given, **how: searched.append(given) or search(*given, **how))
    figures = verdict(work, table, planned).figures
    assert figures["gathers_only_us"] == planned.predicted.baselines_us["gathers-only"] and not searched


@pytest.mark.parametrize("answer", [HELPS, HELPS_NOT, CANNOT_TELL, None])
def test_a_verdict_says_first_that_nothing_fits_without_a_plan(answer):
    figures = {"answer": answer, "compared_with": "other", "measure_better": "reduce", "iteration_time_us": 2.0}
    without = {"refused": "short", "iteration_time_us": 1.0, "by": "stock"}
    said = conclusion_of({**figures, "without_plan": without})
    assert said.startswith("needed, because without a plan these settings do not fit")
    assert answer is None or f". Compared with other: {answer}" in said
    of_stock = conclusion_of({**figures, "compared_with": OVERLAPPED, "without_plan": without})
    assert of_stock == "needed, because without a plan these settings do not fit"  # stock Megatron does not fit
    itself = {"compared_with": "the best plan by all-gathers alone (this plan)"}
    assert conclusion_of({**figures, **itself, "without_plan": without}) == of_stock
    assert "needed" not in conclusion_of({**figures, "without_plan": {**without, "refused": None}})


def test_without_measured_all_gathers_there_is_no_answer():
    work = make_workload()
    figures = judged(work, make_table(work, gpu=None)).figures
    assert figures["answer"] is None and figures["gain"] is None


def test_a_verdict_counts_how_uncertain_two_legs_are():
    """Flat and hierarchical gathers err apart: a gain of 5 % between figures of +- 10 % is none."""
    work = make_workload(dp=4, gpus_per_node=2)
    flat = make_table(work, cpu=None, gpu=(20.0, 20.0)).routes.gpu.points

    def found(factor: float, spread: float):
        def points(by: float):
            return tuple(replace(p, p50_us=p.p50_us * by, p95_us=p.p50_us * by * (1 + spread), samples=3) for p in flat)

        gpu = cost.Curve(points=points(1.0), algorithms={"hierarchical": points(factor)})
        return judged(work, replace(make_table(work, cpu=None), routes=cost.Routes(gpu=gpu))).figures

    assert found(0.5, 1e-6)["helps"] is True
    assert found(0.95, 0.5)["helps"] is None


def test_a_larger_workload_takes_fewer_tables(monkeypatch):
    monkeypatch.setattr("megatron_ext.planner.gain_interval.MOST", 128)
    small, large = make_workload(), make_workload(pp=8, vp=2, microbatches=512)
    assert tables_to_draw(large, *[stock_schedule(large)] * 2) < tables_to_draw(small, *[stock_schedule(small)] * 2)


def of_shared_links(machine: str, dp: int, of_node: int):
    """A workload, a sheet with one range (a GPU has its own link to the host, or two share one), the table for them,
    and plans by host copies and by all-gathers alone."""

    def exact(node, field=""):
        if not isinstance(node, dict):
            return node
        figures = {name: exact(value, f"{field}.{name}") for name, value in node.items()}
        return figures if field == ".host_link.gpus_per_link" else figures | dict.fromkeys({"low", "high"} & {*node})

    sheet = msgspec.convert(exact(msgspec.to_builtins(sheets.load(machine))), sheets.HardwareSheet)
    assert sheet.host_link.gpus_per_link.ends == (1, 2)
    shape = GptShape(3, 4096, 16384, 32, 32, 1024, 128, positions=1024, tied=False)
    parallel = sized(pp=1, vp=1, dp=dp, microbatches=2, order="no_pipeline", gpus_per_node=of_node)
    work = gpt_workload(shape, parallel, BATCH, zero_stage=3, limits=Limits(whole_parameter_bytes=1 << 29))
    table = estimate(sheet, work, BATCH)
    return work, sheet, table, *(plan(work, table, policy=policy) for policy in ("all-cpu", "all-gpu"))


def test_an_estimate_is_as_uncertain_as_its_data_sheet_and_no_more():
    work, sheet, table, ours, other = of_shared_links("h100-nvlink", 8, 8)
    on = GainOnTables(work, ours, other, False).on

    def at(shared: float) -> float:
        choose = lambda field, figure: shared if field == "host_link.gpus_per_link" else figure.value
        return on(estimate(sheets.drawn(sheet, choose), work, BATCH))

    found = gain_interval(work, table, ours, other)
    assert at(2.0) < at(1.85) < at(1.5) < on(table) == at(1.0)
    assert found.low < at(1.85) and on(table) < found.high < on(table) + 2 * WIDTH * MODEL_ERROR


def test_of_estimated_costs_the_one_with_the_widest_range_is_to_be_measured():
    work, _, table, ours, other = of_shared_links("h100-ethernet", 4, 2)
    assert dominant_cost(work, table, ours, other) == "routes.cpu"
