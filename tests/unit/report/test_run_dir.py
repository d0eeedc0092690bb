"""Whatever is written into a file of a run: it is reported, or refused in one line."""

import json
import random
import shutil

import pytest
from run_files import change, make_events, make_run
from variations import some

from megatron_ext import report
from megatron_ext.formats import trace as traces
from megatron_ext.formats.errors import InputError
from megatron_ext.report.calibrate import calibrate
from megatron_ext.report.report_text import ending
from megatron_ext.report.run_dir import READ
from megatron_ext.report.turn_ratio import WRONG
from megatron_ext.schedule import schedules

ODD = (None, True, -1, 0, 1, 3, 2**63, 1e308, -0.5, "", "x", "0F0", [], {}, [[]], [None], {"a": 1})


def places(value, path=()):
    """Paths of every node of a JSON value."""
    yield path
    if isinstance(value, dict | list):
        for key, node in value.items() if isinstance(value, dict) else enumerate(value):
            yield from places(node, (*path, key))


def put(value, path, odd):
    """``value`` with the node at ``path`` replaced (or, with ``...``, taken out)."""
    if not path:
        return odd if odd is not ... else {}
    node = value
    for key in path[:-1]:
        node = node[key]
    if odd is ...:
        del node[path[-1]]
    else:
        node[path[-1]] = odd
    return value


@pytest.mark.parametrize("name", READ.values())
def test_an_odd_value_anywhere_is_reported_or_refused(tmp_path, name):
    make_run(tmp_path, iterations=3, dp=1)
    text = (tmp_path / name).read_text()
    everywhere = list(places(json.loads(text)))
    choose = random.Random(name)
    refused = 0
    for _ in some(range(20), 10):
        damaged = put(json.loads(text), choose.choice(everywhere), choose.choice((*ODD, ...)))
        (tmp_path / name).write_text(json.dumps(damaged))
        try:
            report.build(report.load(tmp_path))
        except InputError as error:
            refused += 1
            assert "\n" not in str(error)
    assert refused > 2  # most of what is put there cannot be meant


@pytest.mark.parametrize("how", ["without a schedule, or as the reference", "stock's", "planned again"])
def test_a_trace_of_another_training_is_refused(tmp_path, how):
    """All of them have the steps of the workload."""
    make_run(tmp_path)
    report.load(tmp_path)
    if how == "planned again":
        change(tmp_path / "schedule.json", lambda schedule: schedule.pop("predicted") and None)
    elif how == "stock's":
        shutil.copy(tmp_path / "stock.trace.json", tmp_path / "scheduled.trace.json")
    else:
        change(tmp_path / "scheduled.trace.json", lambda trace: trace.update(otherData={**BEFORE, "scheduled": False}))
    with pytest.raises(InputError, match=r"scheduled.trace.json: is not of a training by this schedule.json: by ano"):
        report.load(tmp_path)


BEFORE = {"kind": "measured", "scheduled": True, "moved_bytes": []}
"""What a trace of an earlier version says."""


def test_a_trace_that_does_not_name_its_schedule_is_read(tmp_path):
    make_run(tmp_path)
    change(tmp_path / "scheduled.trace.json", lambda trace: trace.update(otherData=BEFORE))
    assert report.load(tmp_path).scheduled_trace.about.schedule_sha256 is None


def skip(*iterations):
    """Their optimizer steps changed nothing."""

    def changed(trace):
        for row in trace["traceEvents"]:
            if row["name"] == "step" and row["args"]["iteration"] in iterations:
                row["name"] = "skipped step"

    return changed


def test_iterations_whose_update_was_skipped_do_not_count(tmp_path):
    make_run(tmp_path)
    change(tmp_path / "scheduled.trace.json", skip(4, 5))
    run = report.load(tmp_path)
    assert run.counted == [2, 5] and report.build(run).iteration_time_us.scheduled.samples == 2
    change(tmp_path / "scheduled.trace.json", skip(*range(1, 7)))
    with pytest.raises(InputError, match="scheduled.trace.json: all iterations are of a smaller batch, or skipped"):
        report.load(tmp_path)


def test_the_first_iteration_of_a_turn_does_not_count_without_the_other_run(tmp_path):
    make_run(tmp_path)
    change(tmp_path / "scheduled.metrics.json", lambda metrics: metrics.update(turn_iterations=3))
    (tmp_path / "stock.trace.json").unlink()
    run = report.load(tmp_path)
    assert run.turn_iterations is None and run.counted == [2, 4, 5]


def test_a_run_of_fewer_iterations_than_the_warm_up_is_not_calibrated(tmp_path):
    for iterations in (2, 3):
        make_run(tmp_path, iterations=iterations)
        run = report.load(tmp_path)
        if iterations == 3:
            assert calibrate(run).factors
        else:
            with pytest.raises(InputError, match="scheduled.trace.json: has too few iterations: the first 2 do not"):
                calibrate(run)


def test_of_a_run_whose_batch_grows_the_last_number_of_micro_batches_is_reported(tmp_path):
    work = make_run(tmp_path)
    for name in ("scheduled.metrics.json", "stock.metrics.json", "reference.metrics.json", "stock.trace.json"):
        (tmp_path / name).unlink()
    (tmp_path / "schedules").mkdir()
    shutil.move(tmp_path / "schedule.json", tmp_path / "schedules" / "4.json")
    change(tmp_path / "workload.json", lambda work: work.update(ramp=[2]))
    quiet = {"issue_us": lambda i, rank: 0.0, "wait_us": lambda i, rank: 0.0}
    small, full = (make_events(work.with_microbatches(number).parallel, 6, **quiet) for number in (2, 4))
    events = [event for event in small if event.iteration < 4] + [event for event in full if event.iteration >= 4]
    about = traces.AboutTraining(True, schedules.sha256(tmp_path / "schedules"))
    traces.save(tmp_path / "scheduled.trace.json", events, about=about)
    run = report.load(tmp_path)
    assert run.counted == [3, 4, 5]
    built = report.build(run)._replace(verdict_was=WRONG)
    assert built.run.counted[0] == 3 and ending(built)[2] == f"add: --user-defined-schedule {tmp_path}/schedules"
    by_plan = (tmp_path / "schedules").rename(tmp_path / "schedule.json")  # as plan --out names the directory
    assert ending(built)[2] == f"add: --user-defined-schedule {by_plan}"
    by_plan.rename(tmp_path / "schedules")
    change(tmp_path / "workload.json", lambda work: work.update(ramp=[]))
    shutil.copy(tmp_path / "schedules" / "4.json", tmp_path / "schedule.json")
    with pytest.raises(InputError, match="not those of the workload in iteration 1 of rank 0"):
        report.load(tmp_path)
