"""``simulate``: what it prints of a workload alone, and what it refuses."""

import json

import pytest
from msgspec.structs import replace
from planning_cases import WHOLE, make_table, make_workload

from megatron_ext.cli import main as cli
from megatron_ext.cost import cost_table as cost
from megatron_ext.planner import plan
from megatron_ext.planner.evaluate import evaluate
from megatron_ext.schedule import user_defined_schedule
from megatron_ext.workload import workload
from megatron_ext.workload.workload import Limits

WORK = make_workload(pp=2, vp=1, microbatches=4, order="1f1b")


@pytest.fixture
def run(tmp_path, capsys):
    workload.save(tmp_path / "w.json", WORK)
    cost.save(tmp_path / "t.json", make_table(WORK, **WHOLE))
    files = ["--cost-table", str(tmp_path / "t.json"), "--workload", str(tmp_path / "w.json")]

    def run(*options: str):
        return cli.main(["simulate", *files, *options]), *capsys.readouterr()

    return run


def test_the_order_is_named(run):
    code, out, error = run("--json")
    assert code == 0, error
    figures = json.loads(out)
    assert figures["order"] == "1f1b"
    assert figures["iteration_time_us"] >= figures["lower_bound_us"] > 0
    assert "order        1f1b\n" in error
    *_, limit, fastest, host, add, last = error.splitlines()
    assert fastest.startswith("fastest: ") and "ms, stock Megatron with" in fastest
    assert (host, add) == ("host memory: 0.00 GiB per node", "add: nothing")
    assert limit.startswith("limit: ") and last.startswith("verdict: an iteration takes ")
    low, high = (figures["interval"] or {}).get("low_us"), (figures["interval"] or {}).get("high_us")
    us = figures["iteration_time_us"]
    assert "synthetic" not in last
    assert (f"{low / 1e3:.3f} to {high / 1e3:.3f} ms by" if low else f"{us / 1e3:.3f} ms by") in last


def test_the_last_line_says_that_a_table_is_synthetic(run, tmp_path):
    table = make_table(WORK, **WHOLE)
    cost.save(tmp_path / "t.json", replace(table, metadata=replace(table.metadata, synthetic=True)))
    code, out, _ = run()
    assert code == 0 and "synthetic cost table" in out.splitlines()[-1]


def test_a_schedule_that_is_as_fast_as_none_is_not_to_be_added(run, tmp_path):
    work = make_workload(pp=1, vp=1, order="no_pipeline")
    workload.save(tmp_path / "w.json", work)
    user_defined_schedule.save(tmp_path / "s.json", plan(work, make_table(work, **WHOLE), policy="all-gpu"))
    code, out, _ = run("--schedule", str(tmp_path / "s.json"))
    assert code == 0 and out.splitlines()[-2] == "add: nothing"


def test_what_was_not_measured_makes_an_interval_or_is_refused(run, tmp_path):
    _, out, error = run("--json")
    figures = json.loads(out)
    interval = figures["interval"]
    assert interval["low_us"] <= figures["iteration_time_us"] < interval["high_us"] and "not measured, so" in error
    cost.save(tmp_path / "t.json", make_table(WORK, reduce=WHOLE["reduce"]))
    code, out, error = run("--json")
    assert (code, out) == (2, "") and "t.json: optimizer: the prediction needs it" in error


def test_activations_that_nobody_counted_are_said(run, tmp_path):
    """Or a limit of the device's bytes would seem to be kept."""
    (first, *others) = (replace(chunk, activation_bytes=(8,) * chunk.num_layers) for chunk in WORK.chunks)
    workload.save(tmp_path / "w.json", replace(WORK, chunks=(first, *others)))
    assert "not counted" not in run()[1]
    workload.save(tmp_path / "w.json", replace(WORK, chunks=(replace(first, activation_bytes=()), *others)))
    assert "activations of rank 0 chunk 0 are not counted; leave room for them in --limit-device-bytes" in run()[1]


def test_the_bound_without_a_schedule_holds_for_every_schedule(run, tmp_path):
    """Shards may rest in host memory, whatever stock Megatron's rule keeps on the device."""
    free = replace(make_workload(pp=1, vp=1, microbatches=4, layers=6, order="no_pipeline"), zero_stage=3)
    table = make_table(free, **WHOLE | {"gpu": (20.0, 200.0), "cpu": (10.0, 500.0)})
    held = max(bill.memory.device_total_bytes for bill in evaluate(free, table).memory)
    work = replace(free, limits=Limits(device_bytes=held))
    workload.save(tmp_path / "w.json", work)
    cost.save(tmp_path / "t.json", table)
    code, out, error = run("--json")
    assert code == 0, error
    predicted = plan(work, table).predicted
    assert json.loads(out)["lower_bound_us"] <= predicted.iteration_time_us < json.loads(out)["iteration_time_us"]


def test_a_schedule_that_breaks_its_own_device_limit_is_refused(run, tmp_path):
    schedule = plan(WORK, make_table(WORK, **WHOLE), policy="all-gpu")
    most = max(memory.device_total_bytes for memory in schedule.predicted.memory)
    for limit, expected in ((most, 0), (most - 1, 2)):
        edited = replace(schedule, limits=replace(schedule.limits, device_bytes=limit))
        user_defined_schedule.save(tmp_path / "s.json", edited)
        code, _, error = run("--schedule", str(tmp_path / "s.json"))
        assert code == expected
    assert f"s.json: limits.device_bytes = {most - 1}: pipeline rank" in error and "1 bytes short" in error
