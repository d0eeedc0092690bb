"""Which drive the tier for GPUs takes."""

from pathlib import Path

import drive_place
import pytest


@pytest.fixture
def drives(monkeypatch):
    """``drives(directory=(device, rate, why))``; rates that were asked for, in order."""
    asked = []

    def of_machine(**known):
        known = {Path(f"/{name}"): what for name, what in known.items()}
        monkeypatch.setattr(drive_place, "device_number", lambda directory: known[directory][0])

        def tried(directory, least_free, tried_bytes):
            asked.append(directory.name)
            return known[directory][1:]

        monkeypatch.setattr(drive_place, "tried", tried)
        return drive_place.find(known, 0), asked

    return of_machine


def test_the_fastest_is_taken(drives):
    found, asked = drives(root=(1, 125e6, ""), home=(2, 90e6, ""), scratch=(3, 900e6, ""))
    assert found == (Path("/scratch"), "", 900e6) and asked == ["root", "home", "scratch"]


def test_nothing_is_looked_for_behind_one_that_is_fast_enough(drives):
    found, asked = drives(root=(1, 2e9, ""), scratch=(2, 9e9, ""))
    assert found.directory == Path("/root") and asked == ["root"]


def test_one_drive_is_tried_once_but_where_a_directory_cannot_be_used(drives):
    found, asked = drives(a=(1, 0.0, "read-only"), b=(1, 2e8, ""), c=(1, 3e8, ""))
    assert found == (Path("/b"), "/a: read-only", 2e8) and asked == ["a", "b"]


def test_none_is_said_with_all_reasons(drives):
    found, _ = drives(a=(1, 0.0, "read-only"), b=(2, 0.0, "is on tmpfs"))
    assert found.directory is None and found.said == "/a: read-only; /b: is on tmpfs"


def test_a_rate_is_that_of_what_was_written_and_read(monkeypatch, tmp_path):
    moved = []

    class File:
        def write(self, memory, offset, what):
            moved.append(bytes(memory))

        def flush(self, offset, size_bytes, what):
            assert size_bytes == len(moved[0])

        def read(self, memory, offset, what):
            memory[:] = moved[0]

        def close(self):
            moved.append(b"closed")

    monkeypatch.setattr(drive_place, "open_own", lambda directory, size_bytes, reads: File())
    rate, why = drive_place.tried(tmp_path, 0, 1 << 20)
    assert rate > 0 and why == "" and [len(one) for one in moved] == [1 << 20, 6]
