"""``simulate --order``: what it prints, and what it refuses."""

import json

import pytest
from planning_cases import WHOLE, make_table, make_workload

from megatron_ext.cli import main as cli
from megatron_ext.cost import cost_table as cost
from megatron_ext.workload import workload

WORK = make_workload(pp=2, vp=1, microbatches=4, order="1f1b")


@pytest.fixture
def run(tmp_path, capsys):
    workload.save(tmp_path / "w.json", WORK)
    cost.save(tmp_path / "t.json", make_table(WORK, **WHOLE))
    files = ["--cost-table", str(tmp_path / "t.json"), "--workload", str(tmp_path / "w.json")]

    def run(*options: str):
        return cli.main(["simulate", *files, *options]), *capsys.readouterr()

    return run


@pytest.mark.parametrize(
    "order, in_flight, versions",
    [(None, [2, 1], 1), ("gpipe", [4, 4], 1), ("eager_1f1b", [3, 1], 1), ("pipedream_2bw", [2, 1], 2)],
)
def test_the_order_is_named_with_what_it_keeps(run, order, in_flight, versions):
    code, out, error = run("--json", *(("--order", order) if order else ()))
    assert code == 0, error
    figures = json.loads(out)
    assert figures["order"] == (order or "1f1b") and figures["weight_versions"] == versions
    assert figures["microbatches_in_flight"] == in_flight
    assert figures["iteration_time_us"] >= figures["lower_bound_us"] > 0
    text = f"order        {order or '1f1b'}; in flight, by rank: {', '.join(map(str, in_flight))} micro-batches"
    assert f"{text}; weight versions: {versions}\n" in error
    *_, limit, last = error.splitlines()
    assert limit.startswith("limit: ") and last.startswith("verdict: an iteration takes ")
    low, high = (figures["interval"] or {}).get("low_us"), (figures["interval"] or {}).get("high_us")
    us = figures["iteration_time_us"]
    assert (f"{low / 1e3:.3f} to {high / 1e3:.3f} ms by" if low else f"{us / 1e3:.3f} ms by") in last


def test_what_was_not_measured_makes_an_interval_or_is_refused(run, tmp_path):
    _, out, error = run("--json")
    figures = json.loads(out)
    interval = figures["interval"]
    assert interval["low_us"] <= figures["iteration_time_us"] < interval["high_us"] and "not measured, so" in error
    cost.save(tmp_path / "t.json", make_table(WORK, reduce=WHOLE["reduce"]))
    code, out, error = run("--json")
    assert (code, out) == (2, "") and "t.json: optimizer: the prediction needs it" in error


def test_a_schedule_keeps_its_own_order(run):
    code, out, error = run("--order", "gpipe", "--schedule", "s.json")
    assert (code, out) == (2, "") and "--order = 'gpipe': a schedule has its own order of steps" in error
    assert run("--order", "zigzag")[0] == 2
