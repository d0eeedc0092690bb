"""What people read while something is measured, where nothing can be drawn."""

import sys
import time

import pytest

from megatron_ext.measure import progress_bar
from megatron_ext.measure.progress_bar import Words, bar, visit_text


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(progress_bar, "monotonic", lambda: now[0])
    return now


def test_the_start_is_said_and_what_is_left_is_counted_from_its_end(clock):
    words = Words(40.0)
    clock[0] += 11
    assert words.line() == "starting: 11 s"
    words.update(0, 706, "compute, once")
    clock[0] += 10
    assert words.line() == "starting: 21 s, compute, once for 10 s"
    words.update(1, 706, "gpu 4 KiB")
    assert words.line() == "1 of 706: gpu 4 KiB, 40 s left"
    clock[0] += 12
    words.update(2, 706, "gpu 4 KiB")
    assert words.line() == "2 of 706: gpu 4 KiB for 12 s, 28 s left"
    clock[0] += 30
    assert words.line() == "2 of 706: gpu 4 KiB for 42 s, 2 s over"


def test_memory_that_takes_long_to_make_is_said():
    assert visit_text("cpu", 512, 0, 0.1) == "cpu 512 B"
    assert visit_text("gpu", 6144, 1 << 30, 1.0) == "gpu 6 KiB"
    assert visit_text("optimizer", 2 << 30, 9 << 30, 12.4) == (
        "optimizer 2048 MiB, making 9.7 GB of host memory, about 12 s"
    )


def test_lines_come_also_where_nothing_new_is_told(monkeypatch, capsys):
    monkeypatch.setattr(progress_bar, "WORD_SECONDS", 0.02)
    with bar(40.0, sys.stderr) as progress:
        progress(3, 9, "optimizer 2 GiB")
        time.sleep(0.2)
    said = capsys.readouterr().err
    assert said.count("3 of 9: optimizer 2 GiB, 40 s left") >= 2
    time.sleep(0.1)
    assert capsys.readouterr().err == ""


def test_a_terminal_has_one_line_that_changes(monkeypatch, capsys):
    monkeypatch.setattr(progress_bar, "DRAWN_SECONDS", 0.02)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "20")  # pytest asks for the width, too, while this holds
    with bar(40.0, sys.stderr) as progress:
        progress(3, 9, "optimizer 2 GiB")
        time.sleep(0.15)
    lines = capsys.readouterr().err.split(progress_bar.CLEAR)
    assert len(lines) > 3 and lines[-2] == "3 of 9: optimizer 2" and lines[-1] == "" and "\n" not in "".join(lines)
