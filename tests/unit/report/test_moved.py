"""Bytes as billed beside those that a run has counted."""

import pytest
from run_files import change, make_run

from megatron_ext import report
from megatron_ext.formats.errors import InputError
from megatron_ext.report import moved as moved_bytes
from megatron_ext.report import report_text
from megatron_ext.schedule import validate
from megatron_ext.schedule.byte_bill import byte_bill

ITERATIONS = 6


@pytest.fixture
def counted(tmp_path):
    """``counted(change)``: a run whose ranks have counted what is billed, but for ``change(counts)``, by rank and
    iteration."""
    work = make_run(tmp_path, iterations=ITERATIONS)
    bills = byte_bill(validate.load(tmp_path / "schedule.json"), work)
    counts = [
        [{kind: dict(own) for kind, own in bills[rank // 2][rank % 2].items()} for _ in range(ITERATIONS)]
        for rank in range(4)
    ]

    def build(changed=lambda counts: None):
        changed(counts)
        change(tmp_path / "scheduled.trace.json", lambda trace: trace["otherData"].update(moved_bytes=counts))
        return report.build(report.load(tmp_path))

    return build


def test_what_is_as_planned_is_said_in_one_line(counted):
    built = counted()
    assert [one.rank for one in built.moved] == [0, 1, 2, 3] and all(one.planned == one.counted for one in built.moved)
    said = "every rank has moved the planned bytes, by kind and link"
    assert moved_bytes.lines(built.moved) == [said]
    text, page = report_text.as_text(built, width=200), report_text.as_markdown(built)
    assert said in text and said in page
    (head, *rows) = moved_bytes.rows(built.moved)
    assert head[1:] == ("planned", "counted", "") and all(row[1] == row[2] and row[3] == "1.000" for row in rows)
    assert all(row[0].strip() in text and row[0].strip() in page for row in rows)
    assert all(not one["differences"] for one in report_text.as_json(built)["moved_bytes"])


def test_a_difference_is_said_by_kind_and_link(counted):
    def twice(counts) -> None:
        for own in counts[2]:
            own["gradient"]["network"] *= 2

    built = counted(twice)
    planned = built.moved[2].planned["gradient"]["network"]
    line = f"rank 2: gradient, network: planned {planned}, counted {2 * planned} bytes per iteration"
    assert moved_bytes.lines(built.moved) == [line] and line in report_text.as_text(built, width=200)
    figures = report_text.as_json(built)["moved_bytes"]
    assert figures[2]["differences"] == [
        {"kind": "gradient", "link": "network", "planned": planned, "counted": 2 * planned}
    ]
    assert not figures[0]["differences"]


def test_one_iteration_behind_an_evaluation_does_not_count(counted):
    assert moved_bytes.lines(counted(lambda counts: counts[0][4].clear()).moved)[0].startswith("every rank")


def test_many_differences_are_cut(counted):
    built = counted(lambda counts: [own.clear() for rank in counts for own in rank])
    lines = moved_bytes.lines(built.moved)
    assert len(lines) == moved_bytes.MOST_LINES and lines[-1].endswith("more, see --json")


def test_a_trace_without_counts_has_no_figures(tmp_path):
    make_run(tmp_path)
    built = report.build(report.load(tmp_path))
    assert built.moved == [] == moved_bytes.rows(built.moved) == moved_bytes.lines(built.moved)
    assert "bytes moved in" not in report_text.as_text(built)


@pytest.mark.parametrize("value", [[[{"gather": {"to_device": 1}}]] * 4, [[{"gather": {"warp": 1}}] * 6] * 4])
def test_damaged_counts_are_refused(tmp_path, value):
    make_run(tmp_path)
    change(tmp_path / "scheduled.trace.json", lambda trace: trace["otherData"].update(moved_bytes=value))
    with pytest.raises(InputError, match="otherData.*moved_bytes"):
        report.load(tmp_path)
