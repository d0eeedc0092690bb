"""Whatever is written into a file of a run: it is reported, or refused in one line."""

import json
import random
import shutil

import pytest
from run_files import change, make_run
from variations import some

from megatron_ext import report
from megatron_ext.formats.errors import InputError
from megatron_ext.report.report_text import cautions
from megatron_ext.report.run_dir import READ

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


def test_a_report_says_that_a_trace_does_not_name_its_schedule(tmp_path):
    make_run(tmp_path)
    assert not cautions(report.build(report.load(tmp_path)))
    change(tmp_path / "scheduled.trace.json", lambda trace: trace.update(otherData=BEFORE))
    (note,) = cautions(report.build(report.load(tmp_path)))
    assert "does not say by which schedule" in note
