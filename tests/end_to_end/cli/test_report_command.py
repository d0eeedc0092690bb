"""``megatron-ext report RUN_DIR``: its figures, and what damaged runs get."""

import json
import re
import subprocess
import sys

import pytest
from msgspec.structs import replace
from planning_cases import make_workload
from run_files import change, make_run

from megatron_ext.cli import main as cli
from megatron_ext.cost import cost_table as cost
from megatron_ext.formats import json_files
from megatron_ext.planner import plan
from megatron_ext.planner.evaluate import evaluate
from megatron_ext.planner.stock import stock_schedule
from megatron_ext.report import timeline
from megatron_ext.report.run_dir import GATHERS_ONLY, READ
from megatron_ext.schedule import user_defined_schedule as schedule
from megatron_ext.schedule.memory_bill import memory_bill
from megatron_ext.workload import workload
from megatron_ext.workload.workload import Limits


@pytest.fixture(autouse=True)
def no_picture(request, monkeypatch):
    """Drawing takes longest, and is tested by itself."""
    if "picture" not in request.node.name:
        monkeypatch.setattr(timeline, "save", lambda report, path: None)


def command(capsys, *arguments) -> tuple[int, str, str]:
    code = cli.main(["report", *map(str, arguments)])
    said = capsys.readouterr()
    return code, said.out, said.err


def figures(capsys, path) -> dict:
    code, out, err = command(capsys, path, "--json")
    assert code == 0, err
    return json.loads(out)


def test_the_object_holds_medians_of_both_runs(tmp_path, capsys):
    make_run(tmp_path, iterations=6)
    found = figures(capsys, tmp_path)
    assert found["iterations"] == 6 and found["bitwise_equal"] is True
    # Iterations 3 to 6. Scheduled: rank 0 issues i and waits 2 i; every rank publishes for 1.
    assert found["exposed_us"] == {"stock": 30.0, "scheduled": 9.0}
    assert found["gather_us"] == {"stock": 40.0 + 30.0 + 1.0, "scheduled": 3 * 4.5 + 1.0}
    assert found["iteration_time_us"] == {"stock": 2004.5, "scheduled": 1004.5}
    assert found["spread"]["exposed_us"]["scheduled"]["samples"] == 4
    table, work = cost.load(tmp_path / "cost_table.json"), workload.load(tmp_path / "workload.json")
    planned = schedule.read_unchecked(tmp_path / "schedule.json")
    expected = {"stock": evaluate(work, table).iteration_time_us, "scheduled": planned.predicted.iteration_time_us}
    assert found["predicted_iteration_time_us"] == expected
    assert found["predicted_relative_error"]["scheduled"] == pytest.approx(expected["scheduled"] / 1004.5 - 1)


@pytest.mark.parametrize("missing", ["stock.trace", "stock.metrics", "scheduled.metrics"])
def test_without_stock_the_parts_are_set_beside_their_predictions(tmp_path, capsys, missing):
    """A script of the user's writes no metrics, and a model that fits by a schedule alone has no stock run."""
    make_run(tmp_path, iterations=6)
    whole = figures(capsys, tmp_path)
    (tmp_path / f"{missing}.json").unlink()
    found = figures(capsys, tmp_path)
    same = ("explains", "hidden", "links_busy", "moved_bytes", "predicted_iteration_time_us", "iterations", "verdict")
    assert all(found[name] == whole[name] for name in same) and found["parts"].keys() == whole["parts"].keys()
    assert found["parts"]["forward"] == whole["parts"]["forward"] and found["parts"]["forward"]["measured_us"] > 0
    assert found["exposed_us"] == {"stock": None, "scheduled": whole["exposed_us"]["scheduled"]}
    assert found["iteration_time_us"]["stock"] is found["predicted_relative_error"]["stock"] is None
    assert found["iteration_time_us"]["scheduled"] == pytest.approx(whole["iteration_time_us"]["scheduled"])
    assert found["bitwise_equal"] is (None if missing == "scheduled.metrics" else True)
    assert f"without {missing}.json: a gain is predicted and not measured" in found["compared_with"]
    _, out, _ = command(capsys, tmp_path)
    for text in (out, (tmp_path / "report.md").read_text()):
        assert "predicted" in text and "training without this schedule was not measured" in " ".join(text.split())
    assert cli.main(["cost", "calibrate", str(tmp_path)]) == 0


def test_table_page_and_picture_say_the_same(tmp_path, capsys):
    make_run(tmp_path, iterations=6)
    code, out, _ = command(capsys, tmp_path)
    page = (tmp_path / "report.md").read_text()
    assert code == 0
    for text in (out, page):
        for said in (
            f"{2004.5 / 1e3:.3f}",
            f"{1004.5 / 1e3:.3f}",
            "0.501",
            "bitwise",
            "exposed time",
            "iteration time, ms",
            "first 2 left out",
        ):
            assert said in text, said
    for name in ("report.md", "timeline.png"):
        assert (tmp_path / name).stat().st_size > 500 and name in out
    assert "![timeline](timeline.png)" in page
    assert "| 6 | 0.8333335 | 0.8333333 | 0.8333333 |" in page


def test_without_a_reference_equality_is_not_claimed(tmp_path, capsys):
    make_run(tmp_path, reference=False)
    assert figures(capsys, tmp_path)["bitwise_equal"] is None
    _, out, _ = command(capsys, tmp_path)
    for text in (out, (tmp_path / "report.md").read_text()):
        assert "equality not checked" in text.lower() and "bitwise" not in text


def test_a_difference_from_the_reference_is_said_and_where(tmp_path, capsys):
    make_run(tmp_path)
    change(tmp_path / "reference.metrics.json", lambda m: m["loss"].__setitem__(4, 1.25))
    found = figures(capsys, tmp_path)
    assert found["bitwise_equal"] is False and "iteration 5" in found["differences"][0]
    _, out, _ = command(capsys, tmp_path)
    assert "NOT equal" in out and "loss at iteration 5" in " ".join(out.split())
    assert "loss at iteration 5" in (tmp_path / "report.md").read_text()


def test_a_schedule_without_a_prediction_is_simulated(tmp_path, capsys):
    make_run(tmp_path)
    before = figures(capsys, tmp_path)["predicted_iteration_time_us"]
    change(tmp_path / "schedule.json", lambda s: s.pop("predicted") and None)
    change(tmp_path / "scheduled.trace.json", lambda trace: trace["otherData"].pop("schedule_sha256") and None)
    assert figures(capsys, tmp_path)["predicted_iteration_time_us"] == pytest.approx(before)


def test_an_evaluation_changes_no_figure(tmp_path, capsys):
    make_run(tmp_path)
    plain = figures(capsys, tmp_path)
    make_run(tmp_path, evaluated=4)
    assert figures(capsys, tmp_path) == plain


@pytest.mark.parametrize("iterations", [1, 2, 3])
def test_short_runs_are_reported(tmp_path, capsys, iterations):
    make_run(tmp_path, iterations=iterations)
    assert figures(capsys, tmp_path)["iteration_time_us"]["scheduled"] == 1000.0 + iterations


def test_zero_stage_3_is_compared_with_all_gathers_alone(tmp_path, capsys):
    work = make_run(tmp_path, zero_stage=3)
    table = cost.load(tmp_path / "cost_table.json")
    gathers = plan(work, table, policy="gathers-only")
    schedule.save(tmp_path / GATHERS_ONLY, gathers)
    assert "stock.trace.json: is not of a training by this gathers_only" in refused(
        capsys, tmp_path, "stock.trace.json"
    )
    by = {"scheduled": True, "schedule_sha256": json_files.sha256(tmp_path / GATHERS_ONLY)}
    change(tmp_path / "stock.trace.json", lambda trace: trace["otherData"].update(by))
    found = figures(capsys, tmp_path)
    assert found["bitwise_equal"] is True
    assert found["compared_with"].startswith("the best plan by all-gathers alone")
    assert found["predicted_iteration_time_us"]["stock"] == gathers.predicted.iteration_time_us
    _, out, _ = command(capsys, tmp_path)
    for text in (out, (tmp_path / "report.md").read_text()):
        assert "all-gathers alone" in text and "stock's" not in text
    assert re.search(r"\n +all-gathers alone +scheduled +ratio\n", text)
    schedule.save(tmp_path / GATHERS_ONLY, plan(work, table, policy="all-cpu"))
    assert "expected all-gathers alone" in command(capsys, tmp_path)[2]


def test_what_trained_without_a_schedule_at_zero_stage_3_is_called_zero_stage_1(tmp_path, capsys):
    work = make_run(tmp_path, zero_stage=3)
    found = figures(capsys, tmp_path)
    stock = evaluate(replace(work, zero_stage=1), cost.load(tmp_path / "cost_table.json"))
    assert found["predicted_iteration_time_us"]["stock"] == stock.iteration_time_us
    assert "(zero stage 1)" in found["compared_with"]
    assert re.search(r"\n +zero stage 1 +scheduled +ratio\n", (tmp_path / "report.md").read_text())


def test_a_plan_within_a_limit_that_stock_does_not_keep_is_compared_with_it(tmp_path, capsys):
    """The limit is the plan's; stock training was measured all the same."""
    sizes = {"zero_stage": 2, "hidden": 256}
    whole = make_workload(**sizes)
    held = max(bill.memory.device_total_bytes for bill in memory_bill(stock_schedule(whole), whole))
    work = make_run(tmp_path, device_bytes=held * 9 // 10, **sizes)
    found = figures(capsys, tmp_path)
    stock = evaluate(replace(work, limits=Limits()), cost.load(tmp_path / "cost_table.json"))
    assert found["predicted_iteration_time_us"]["stock"] == stock.iteration_time_us
    assert found["iteration_time_us"]["stock"] == 2004.5


def refused(capsys, path, name: str) -> str:
    code, out, err = command(capsys, path)
    assert (code, out) == (2, ""), err
    assert len(err.splitlines()) == 1 and str(path / name) in err
    assert not (path / "report.md").exists()
    return err


@pytest.mark.parametrize("name", ["cost_table.json", "workload.json", "schedule.json", "scheduled.trace.json"])
def test_a_missing_file_is_named(tmp_path, capsys, name):
    make_run(tmp_path)
    (tmp_path / name).unlink()
    said = refused(capsys, tmp_path, name)
    assert ("holds no measured run: train with --user" if "trace" in name else "cannot be read") in said


@pytest.mark.parametrize("name", READ.values())
def test_a_file_cut_off_is_named(tmp_path, capsys, name):
    make_run(tmp_path)
    data = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(data[: len(data) // 2])
    refused(capsys, tmp_path, name)


@pytest.mark.parametrize("name", ["stock.metrics.json", "reference.metrics.json"])
def test_runs_of_other_lengths_are_refused(tmp_path, capsys, name):
    make_run(tmp_path)

    def shorten(metrics):
        for entries in ("loss", "grad_norm", "iteration_us"):
            metrics[entries].pop()

    change(tmp_path / name, shorten)
    assert "has 5 iterations, the scheduled run 6" in refused(capsys, tmp_path, name)


@pytest.mark.parametrize("name", ["stock.metrics.json", "scheduled.metrics.json", "reference.metrics.json"])
def test_a_run_on_other_ranks_is_refused(tmp_path, capsys, name):
    make_run(tmp_path)
    change(tmp_path / name, lambda m: m["parameter_sha256"].pop() and None)
    assert "3 entries for 4 ranks" in refused(capsys, tmp_path, name)


def test_another_cost_table_than_the_plans_is_refused(tmp_path, capsys):
    make_run(tmp_path)
    change(tmp_path / "cost_table.json", lambda t: t["p2p"]["points"][0].update(p50_us=1.0))
    assert "metadata.cost_table_sha256" in refused(capsys, tmp_path, "schedule.json")


def test_another_workload_than_the_schedules_is_refused(tmp_path, capsys):
    make_run(tmp_path)
    change(tmp_path / "workload.json", lambda w: w["parallel"].update(num_microbatches=8))
    assert "num_microbatches" in refused(capsys, tmp_path, "schedule.json")


def test_no_directory_is_refused(tmp_path, capsys):
    code, _, err = command(capsys, tmp_path / "nowhere")
    assert code == 2 and "nowhere: not a directory" in err


def test_neither_torch_nor_megatron_is_imported(tmp_path):
    make_run(tmp_path)
    script = (
        "import sys; from megatron_ext.cli.main import main; code = main(['report', sys.argv[1], '--json']); "
        "sys.exit(code or ','.join(sorted({'torch', 'megatron'} & set(sys.modules))) or None)"
    )
    done = subprocess.run([sys.executable, "-c", script, tmp_path], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["iterations"] == 6
