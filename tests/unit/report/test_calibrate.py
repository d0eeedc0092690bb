"""Parts of an iteration next to their predictions; a run's own figures go back into its table, and the error falls."""

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from early_step_cases import case, on_drive
from msgspec.structs import replace
from planning_cases import WHOLE, line, make_table, make_workload
from run_files import EPOCH_US, change, make_metrics, make_run

from megatron_ext import planner, report
from megatron_ext.cli import main as cli
from megatron_ext.cost import cost_table as cost
from megatron_ext.formats import json_files
from megatron_ext.formats import trace as traces
from megatron_ext.formats.errors import InputError
from megatron_ext.formats.trace import Event
from megatron_ext.planner.evaluate import evaluate
from megatron_ext.planner.reroute import by_cpu_shard, with_host_shards
from megatron_ext.report import parts
from megatron_ext.report.calibrate import calibrate, scaled_routes
from megatron_ext.report.measured_trace import Window
from megatron_ext.report.run_dir import RunDir
from megatron_ext.schedule import user_defined_schedule as schedule
from megatron_ext.workload import workload
from megatron_ext.workload.step_order import steps_of_ranks

WORK = make_workload(pp=2, vp=2, dp=2, microbatches=4, hidden=256, zero_stage=3)
WORK = replace(WORK, chunks=tuple(replace(chunk, layer_kinds=("transformer",) * 2) for chunk in WORK.chunks))
TRUTH = make_table(
    WORK, gpu=(20.0, 2e3), cpu=(10.0, 3e3), contention=(("gpu", "cpu", 1.1), ("cpu", "gpu", 1.2)), **WHOLE
)
WRONG = {"compute": 0.4, "gpu": 2.5, "cpu": 0.5, "optimizer": 0.2, "reduce": 3.0, "publish": 0.5}
"""How many times what it truly takes the first table says."""


def times(curve, factor):
    return replace(curve, points=tuple(replace(p, p50_us=p.p50_us * factor) for p in curve.points))


def wrong_table():
    rows = tuple(
        replace(row, forward_us=row.forward_us * WRONG["compute"], backward_us=row.backward_us * WRONG["compute"])
        for row in TRUTH.compute
    )
    routes = {name: times(getattr(TRUTH.routes, name), WRONG[name]) for name in ("gpu", "cpu")}
    named = {name: times(getattr(TRUTH, name), WRONG[name]) for name in ("optimizer", "reduce")}
    publish = replace(TRUTH.publish, cpu=times(TRUTH.publish.cpu, WRONG["publish"]))
    return replace(TRUTH, compute=rows, routes=replace(TRUTH.routes, **routes), publish=publish, **named)


def trained(path, table, number, true=TRUTH):
    """A run directory: planned by ``table``, and trained on a machine that takes what ``true`` says."""
    path = path / f"run{number}"
    path.mkdir()
    cost.save(path / "cost_table.json", table)
    workload.save(path / "workload.json", WORK)
    planned = planner.plan(
        WORK, table, policy="share-50", cost_table_sha256=json_files.sha256(path / "cost_table.json")
    )
    schedule.save(path / "schedule.json", planned)
    truth = evaluate(WORK, true, planned, trace=True)
    metrics = make_metrics(6, WORK.parallel.world_size, step_us=truth.iteration_time_us)
    for name in ("stock", "scheduled"):
        json_files.save(path / f"{name}.metrics.json", metrics)
        traces.save(path / f"{name}.trace.json", recorded(truth), about={"kind": "measured"})
    return report.load(path)


def recorded(truth):
    """The simulated iteration six times over, on every rank, each step as one event that holds its waits."""
    steps, events, dp = steps_of_ranks(WORK.parallel), [], WORK.parallel.dp
    for rank in range(WORK.parallel.world_size):
        own = [event for event in truth.events if event.rank == rank // dp * dp]
        spans = {}
        for event in own:
            if event.lane == "compute":
                begin, end = spans.get(event.name, (event.start_us, 0.0))
                spans[event.name] = min(begin, event.start_us), max(end, event.start_us + event.duration_us)
        rows = [(str(step), *spans[str(step)]) for step in steps[rank // dp]]
        for iteration in range(1, 7):
            zero = EPOCH_US + iteration * 2 * truth.iteration_time_us
            events += [
                event._replace(rank=rank, start_us=event.start_us + zero, iteration=iteration)
                for event in own
                if event.lane != "compute"
            ]
            for name, begin, end in rows:
                kind = "B" if "B" in name else "F"
                events.append(Event(rank, "compute", kind, begin + zero, end - begin, iteration))
    return events


def test_the_error_falls_to_nothing_by_running_and_calibrating(tmp_path):
    """The machine repeats itself to the microsecond that iterations differ by."""
    table, errors = wrong_table(), []
    for number in range(2):
        found = calibrate(trained(tmp_path, table, number))
        errors.append(abs(found.error_before))
        table = found.table
    errors.append(abs(found.error_after))
    assert errors[0] > 0.3 and errors[1] < 0.005 and errors[-1] < 0.002
    assert {"routes.gpu", "routes.cpu", "publish.cpu", "reduce", "optimizer"} < set(found.factors)
    assert all(
        row.forward_us == pytest.approx(truth.forward_us, rel=0.02) for row, truth in zip(table.compute, TRUTH.compute)
    )
    assert table.optimizer.points[0].p50_us == pytest.approx(TRUTH.optimizer.points[0].p50_us, rel=0.02)
    assert "optimizer x 5" in " ".join(table.metadata.notes)
    assert found.left == () and "not corrected" not in " ".join(table.metadata.notes)


def test_one_row_for_the_layers_of_all_chunks_has_one_factor(tmp_path):
    """That of all of their time, also where chunks took unequal times: it settles."""
    first, *others = TRUTH.compute
    unequal = replace(TRUTH, compute=(replace(first, forward_us=first.forward_us * 1.5), *others))
    layer = cost.Compute(layer_kind="transformer", forward_us=25.0, backward_us=200.0)
    found = calibrate(trained(tmp_path, TRUTH, 0, unequal), replace(TRUTH, compute=(layer,)))
    assert found.factors["compute.forward"] == pytest.approx(2.0 * 4.5 / 4, rel=0.02) and not found.unsettled
    assert found.factors["compute.backward"] == pytest.approx(0.5, rel=0.02) and abs(found.error_after) < 0.05


def test_rows_of_chunks_have_their_own_factors_beside_those_of_kinds(tmp_path):
    layer, table = cost.Compute(layer_kind="transformer", forward_us=20.0, backward_us=200.0), wrong_table()
    table = replace(table, compute=(*table.compute, layer))
    found = calibrate(trained(tmp_path, table, 0))
    *chunks, layer = found.table.compute
    assert [row.forward_us for row in chunks] == pytest.approx([row.forward_us for row in TRUTH.compute], rel=0.02)
    assert layer.forward_us == pytest.approx(20.0 / WRONG["compute"], rel=0.02) and not found.unsettled


def test_what_a_run_says_nothing_of_is_named(tmp_path, capsys):
    """A plan by the corrected table weighs it against what was corrected."""
    run = trained(tmp_path, wrong_table(), 0)
    kept = [event for event in recorded(evaluate(WORK, TRUTH, run.schedule, trace=True)) if event.lane != "gpu"]
    traces.save(run.path / "scheduled.trace.json", kept, about={"kind": "measured"})
    found = calibrate(report.load(run.path))
    assert found.left == ("routes.gpu",) and "routes.gpu" not in found.factors
    assert "does not use it, record it or wait for it: routes.gpu" in found.table.metadata.notes[-1]
    assert cli.main(["cost", "calibrate", str(run.path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["not_corrected"] == ["routes.gpu"]


@pytest.mark.parametrize("kept", [(), ("scheduled.metrics.json",), ("scheduled.metrics.json", "stock.metrics.json")])
def test_of_a_run_without_metrics_or_without_stock_the_trace_is_enough(tmp_path, kept):
    """Scripts that are not the example write none, and not every model fits without a schedule; iterations are timed
    by the trace."""
    run = trained(tmp_path, wrong_table(), 0)
    whole = calibrate(run)
    for name in ("scheduled.metrics.json", "stock.metrics.json", "stock.trace.json"):
        if name not in kept:
            (run.path / name).unlink()
    traced = report.load(run.path)
    assert traced.stock is None and traced.iterations == 6
    assert calibrate(traced).factors == whole.factors
    assert traced.iteration_us[2:5] == pytest.approx(run.iteration_us[2:5], rel=0.05)
    (run.path / "scheduled.trace.json").unlink()
    with pytest.raises(
        InputError, match="no measured run: train with --user-defined-schedule-trace .*/scheduled.trace.json"
    ):
        report.load(run.path)


def traced(made, events, **more) -> Any:
    """What a run of six iterations recorded, each as the simulated one."""
    first_us = min(event.start_us for event in events if event.lane == "compute")
    window = lambda i: Window(i, events, made.iteration_time_us)
    own = lambda i: made.iteration_time_us - first_us
    about = traces.AboutTraining()
    return SimpleNamespace(iterations=6, window=window, iteration_us=own, about=about, unlike=set(), **more)


@pytest.mark.parametrize("early", [True, False])
def test_a_drive_that_optimizer_states_pass_through_is_corrected(early):
    """The drive takes twice as long as the table says, the host's step as long; what is neither is as it was."""
    work, truth, schedule = on_drive(300.0, 200.0)
    _, wrong, _ = on_drive(150.0, 100.0)
    schedule = schedule if early else replace(schedule, rollback_bytes=None)
    made = evaluate(work, truth, schedule, trace=True, extrapolate=True)
    trace = traced(made, made.events)
    found = calibrate(RunDir(Path("runs/x"), wrong, work, schedule, trace), extrapolate=True)
    assert found.factors.pop("routes.nvme") == found.factors.pop("publish.nvme") == pytest.approx(2.0)
    assert list(found.factors.values()) == pytest.approx([1.0] * len(found.factors)) and found.factors
    assert found.error_before < -0.1 and found.error_after == pytest.approx(0.0, abs=1e-6)


def run_of(work, table, truth, schedule) -> RunDir:
    made = evaluate(work, truth, schedule, trace=True, extrapolate=True)
    return RunDir(Path("runs/x"), table, work, schedule, traced(made, made.events))


ONE_STAGE: dict[str, Any] = dict(pp=1, vp=1, dp=4, hidden=256, zero_stage=3, order="no_pipeline", layers=4)


@pytest.mark.parametrize("slow, used", [("internode", {"cpu", "internode"}), ("nvme", {"nvme"})])
@pytest.mark.parametrize("factor", [3.0, 0.4])
def test_all_curves_that_publishing_uses_are_corrected(slow, used, factor):
    """A run has one time for them. The slow one alone is not as the table says."""
    work = make_workload(**ONE_STAGE, gpus_per_node=4 if slow == "nvme" else 2, nvme_slots=3)
    truth = make_table(work, gpu=(20.0, 2e3), cpu=(10.0, 3e3), nvme=(30.0, 1e3), **WHOLE)
    truth = replace(truth, publish=replace(truth.publish, internode=line(10.0, 2e3)))
    curve = getattr(truth.publish, slow)
    table = replace(truth, publish=replace(truth.publish, **{slow: times(curve, 1 / factor)}))
    policies = ["share-50"] if slow == "internode" else [f"random:{seed}" for seed in range(50)]
    made = (planner.plan(work, truth, policy=policy) for policy in policies)
    schedule = next(each for each in made if {to for entry in each.publish for to in entry.to} == used - {"internode"})
    found = calibrate(run_of(work, table, truth, schedule))
    named = {name: by for name, by in found.factors.items() if name.startswith("publish")}
    assert named.keys() == {f"publish.{name}" for name in used} and len(set(named.values())) == 1
    assert (min(named.values()) > 1) == (factor > 1) and not found.unsettled
    after, true = (evaluate(work, each, schedule, extrapolate=True).iteration_time_us for each in (found.table, truth))
    assert after == pytest.approx(true, rel=0.002)
    assert set(found.left) >= {"publish.cpu", "publish.nvme", "publish.internode"} - named.keys()


@pytest.mark.parametrize("factor", [0.7, 1.4])
def test_all_gathers_of_shards_from_the_host_have_the_factor_of_all_gathers(factor):
    """The measured curve of the route has both of its parts."""
    work = make_workload(**ONE_STAGE)
    both = make_table(work, gpu=(20.0, 2e3), cpu=(10.0, 3e3), **WHOLE)
    table = replace(both, routes=replace(both.routes, cpu_shard=line(40.0, 1.2e3)))
    rates = {"gpu": line(20.0, 2e3 / factor), "cpu_shard": line(40.0, 1.2e3 / factor)}
    truth = replace(both, routes=replace(both.routes, **rates))
    schedule = with_host_shards(by_cpu_shard(planner.plan(work, both, policy="all-gpu")), work)
    found = calibrate(run_of(work, table, truth, schedule))
    assert found.factors["routes.gpu"] == pytest.approx(factor, rel=0.1) and not found.unsettled
    after, true = (evaluate(work, each, schedule).iteration_time_us for each in (found.table, truth))
    assert after == pytest.approx(true, rel=0.02)


def test_a_figure_that_no_factor_explains_is_refused_by_name():
    work, table, schedule = case(150.0)
    truth = replace(table, optimizer=times(table.optimizer, 300.0))
    with pytest.raises(InputError, match=r"optimizer: differs from the run by more than 100 times"):
        calibrate(run_of(work, table, truth, schedule), extrapolate=True)


def run_of_reduces(truly_us: float, in_the_table_us: float, microbatches=2):
    """A run does not record when a reduce ends, but how long it waits for it."""
    work, truth, schedule = case(150.0, gradients="sharded", microbatches=microbatches)
    size = schedule.groups[0].bytes
    truth, wrong = (replace(truth, reduce=line(0.0, size / us)) for us in (truly_us, in_the_table_us))
    made = evaluate(work, truth, schedule, trace=True, extrapolate=True)
    seen = [event for event in made.events if event.lane != "reduce"]
    trace = traced(made, seen)
    return RunDir(Path("runs/x"), wrong, work, schedule, trace)


def test_a_reduce_that_compute_hides_is_not_corrected():
    """Of 48 reduces one is waited for, the last."""
    found = calibrate(run_of_reduces(160.0, 80.0, microbatches=12), extrapolate=True)
    assert "reduce" not in found.factors and "reduce" in found.left
    assert "it, record it or wait for it" in found.table.metadata.notes[-1]


@pytest.mark.parametrize("in_the_table_us", [300.0, 20.0, 1000.0])
def test_a_reduce_is_corrected_by_the_waits_for_it(in_the_table_us):
    """Compute hides a part, of one of 20 us most."""
    run = run_of_reduces(600.0, in_the_table_us)
    first = calibrate(run, extrapolate=True)
    again = calibrate(run, first.table, extrapolate=True)
    assert first.factors["reduce"] == pytest.approx(600.0 / in_the_table_us, rel=0.02) and not first.unsettled
    assert abs(first.error_before) > 0.05 and abs(first.error_after) < 0.01 and abs(again.error_after) < 0.002


def test_a_reduce_that_is_waited_for_little_settles_too():
    """Of eight, the last is waited for."""
    found = calibrate(run_of_reduces(150.0, 20.0), extrapolate=True)
    assert found.factors["reduce"] == pytest.approx(150.0 / 20.0, rel=0.1) and not found.unsettled


def test_what_does_not_settle_is_left_as_given_and_named(tmp_path, monkeypatch, capsys):
    """Host memory is slower in the table than in the run, so no curves of copies and publishing make them as fast."""
    table = replace(wrong_table(), host_memory=cost.HostMemory(bytes_per_s=2e9, slow_bytes_per_s=1.9e9))
    run = trained(tmp_path, replace(table, host_memory=None), 0)
    found = calibrate(run, table)
    assert found.unsettled == ("routes.cpu", "publish.cpu")
    assert not {*found.unsettled} & {*found.factors, *found.left}
    assert (found.table.publish, found.table.routes.cpu) == (table.publish, table.routes.cpu)
    assert found.table.optimizer.points[0].p50_us == pytest.approx(TRUTH.optimizer.points[0].p50_us, rel=0.02)
    assert abs(found.error_after) < abs(found.error_before) / 1.5
    monkeypatch.setattr(report, "load", lambda path: run)
    cost.save(tmp_path / "table.json", table)
    given = ["--cost-table", str(tmp_path / "table.json"), "--out", str(tmp_path / "made.json")]
    assert cli.main(["cost", "calibrate", "x", *given]) == 0
    said = capsys.readouterr().out
    assert "\nunsettled: left as given, because no factor " in said and ": routes.cpu, publish.cpu\n" in said
    assert cost.load(tmp_path / "made.json").metadata.notes[-1].startswith("unsettled: ")


def test_a_copy_from_a_staging_slot_has_the_factor_of_copies():
    """The drive's route as measured ends with one."""
    _, table, _ = on_drive(300.0, 200.0)
    copies = replace(table, routes=replace(table.routes, cpu=line(0.0, 100.0), nvme=line(0.0, 20.0)))
    slow = replace(copies, routes=replace(copies.routes, cpu=line(0.0, 25.0)))
    made = scaled_routes(copies, slow, {"routes.nvme": 2.0}, 4)
    rates = {point.size_bytes / point.p50_us for point in made.nvme.points}
    assert max(rates) == pytest.approx(1 / (2 * (1 / 20 - 1 / 100) + 1 / 25)) == pytest.approx(min(rates))


def test_what_explains_the_difference_is_named(tmp_path):
    slow = replace(TRUTH, compute=tuple(replace(row, backward_us=row.backward_us / 3) for row in TRUTH.compute))
    built = report.build(trained(tmp_path, slow, 0))
    found = report.report_text.as_json(built)
    assert found["explains"] == "backward" and found["parts"]["backward"]["measured_us"] > 0
    text = report.report_text.as_text(built)
    assert "backward explains most of the difference" in text.replace("\n", " ") and "ms predicted" in text


def run_of_launches(launch_us, measured_us, at_once, stretched=1.0):
    """On a device, of three micro-batches: 100 us of forward each, and 200 of backward."""
    work = make_workload(pp=1, vp=1, dp=1, order="no_pipeline", microbatches=3, p2p_bytes=0)
    table = make_table(work, **WHOLE)
    rows = (replace(table.compute[0], forward_launch_us=launch_us, backward_launch_us=launch_us),)
    metadata = cost.Metadata(software={"backend": "nccl"})
    table = replace(
        table, compute=rows, metadata=metadata, launches=cost.Launches(reduce_us=launch_us / 10, tensor_us=0.5)
    )
    planned = planner.plan(work, table, policy="all-gpu")
    truth = make_table(work, forward=100.0 * stretched, backward=200.0 * stretched, **WHOLE)
    made = evaluate(work, truth, planned, trace=True)
    trace = traced(made, made.events, launches=lambda indices: (measured_us, at_once))
    return RunDir(Path("runs/x"), table, work, planned, trace)


def test_launches_that_the_device_waits_for_are_corrected_and_not_the_compute_that_waited():
    """The device's steps hold the waits: 4,500 us for 900."""
    run = run_of_launches(400.0, 4500.0, True, stretched=5.0)
    found = calibrate(run)
    launches = 3 * 800.0 + 40.0 * len(run.schedule.groups)
    assert found.factors["launches"] == pytest.approx(4500.0 / launches) and found.error_before < -0.3
    assert not [name for name in found.factors if name.startswith(("compute", "optimizer"))]
    (row,) = found.table.compute
    assert row.forward_launch_us == pytest.approx(400.0 * 4500.0 / launches) and row.forward_us == 100.0
    assert found.table.launches.tensor_us == pytest.approx(0.5 * 4500.0 / launches)
    assert abs(found.error_after) < 0.05


@pytest.mark.parametrize("at_once", [True, False])
def test_launches_that_the_device_hides_are_corrected_where_the_thread_was_faster(at_once):
    """It may have waited for the device."""
    slower, faster = (calibrate(run_of_launches(100.0, us, at_once, stretched=3.0)) for us in (2600.0, 320.0))
    assert "launches" in slower.left and slower.table.compute[0].forward_us == pytest.approx(300.0)
    assert 0.4 < faster.factors["launches"] < 0.6 and faster.table.compute[0].forward_us == pytest.approx(300.0)


@pytest.mark.parametrize(
    "of_run, backend, text",
    [(None, "nccl", "at most 9.000 measured"), (None, "gloo", None), (True, None, "at most 9.000 measured")]
    + [(False, "nccl", None)],
)
def test_a_report_of_a_run_on_devices_has_launches(tmp_path, monkeypatch, of_run, backend, text):
    """Without them launches are a part of the steps. The table may be a data sheet's: the run says where it was."""
    make_run(tmp_path)
    change(tmp_path / "scheduled.trace.json", lambda trace: trace["otherData"].update(on_device=of_run))
    run = report.load(tmp_path)
    rows = tuple(replace(row, forward_launch_us=500.0, backward_launch_us=1e3) for row in run.table.compute)
    table = replace(run.table, compute=rows, metadata=cost.Metadata(software={"backend": backend}))
    monkeypatch.setattr(run.scheduled_trace, "launches", lambda indices: (9e3, True))
    built = report.build(dataclasses.replace(run, table=table))
    said = [line for line in parts.lines(built.parts, built.missed_us) if line.startswith("launches: ")]
    assert [text in line for line in said] == [True] * (text is not None)
    assert [part.limits for part in built.parts if part.name == "launches"] == [True] * len(said)


def test_a_table_of_another_run_is_refused(tmp_path):
    make_run(tmp_path)
    run = report.load(tmp_path)
    other = replace(run.table, metadata=cost.Metadata(world_sizes={"data_parallel_size": 16}))
    with pytest.raises(InputError, match="metadata.*calibrate needs the table of the same run"):
        calibrate(run, other)
