"""Findings of ranks become one report."""

from megatron_ext.doctor.finding import DoctorReport, failed, merged, not_tried, passed, text
from megatron_ext.formats import json_files


def report(*findings) -> DoctorReport:
    return DoctorReport(
        schema_version=2,
        kind="doctor_report",
        created_at="2026-01-01T00:00:00+00:00",
        version="0",
        ranks=2,
        nodes=1,
        machine={"hardware": {"processors": 2}},
        findings=findings,
    )


def test_the_worst_rank_counts_and_is_named():
    ranks = [
        [passed("a", "fine"), passed("b", "fine"), not_tried("c", "no device")],
        [passed("a", "fine too"), failed("b", "broken", "mend it"), passed("c", "fine")],
        [passed("a", "fine"), failed("b", "broken as well", "mend it"), passed("c", "fine")],
    ]
    a, b, c = merged(ranks)
    assert (a.status, a.found) == ("pass", "fine")
    assert (b.status, b.found, b.advice) == ("fail", "rank 1 and 1 more: broken", "mend it")
    assert (c.status, c.found) == ("could not try", "rank 0: no device")


def test_what_all_ranks_found_names_none():
    (only,) = merged([[failed("a", "broken", "")], [failed("a", "broken", "")]])
    assert only.found == "broken"


def test_a_check_that_one_rank_alone_made_is_kept():
    assert [finding.check for finding in merged([[passed("a", "")], [passed("a", ""), failed("b", "", "")]])] == [
        "a",
        "b",
    ]


def test_the_report_is_read_as_it_was_written(tmp_path):
    kept = report(passed("a", "fine", figures={"rate": 1.5}), failed("b", "broken", "mend it"))
    json_files.save(tmp_path / "r.json", kept)
    assert json_files.load(tmp_path / "r.json", DoctorReport) == kept


def test_the_table_says_what_to_do_and_counts():
    kept = report(passed("a", "fine"), failed("b", "broken", "mend it"), not_tried("c", "no device"))
    lines = text(kept).splitlines()
    assert kept.failed and not report(passed("a", "")).failed
    assert lines[1].split() == ["fail", "b", "broken"]
    assert "  b: mend it" in lines and lines[-1] == "1 pass, 1 could not try, 1 fail"
