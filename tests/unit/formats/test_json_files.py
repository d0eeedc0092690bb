"""Files: what is read is what was asked for, and writing replaces nothing but files."""

import os
import stat
import tracemalloc

import pytest
from matplotlib.figure import Figure

from megatron_ext.cost import importers
from megatron_ext.cost.cost_table import CostTable
from megatron_ext.formats import json_files, picture
from megatron_ext.formats.errors import InputError
from megatron_ext.schedule.user_defined_schedule import Schedule
from megatron_ext.workload.workload import Workload


def test_a_file_of_another_kind_is_named_with_the_kind_that_was_expected(tmp_path):
    path = tmp_path / "w.json"
    path.write_text('{"schema_version": 2, "kind": "workload"}')
    with pytest.raises(InputError, match=r"w.json: kind = 'workload': expected a file of kind 'cost_table'"):
        json_files.load(path, CostTable)
    path.write_text('{"schema_version": 2, "kind": "cost_table"}')
    with pytest.raises(InputError, match="a file of kind 'workload'"):
        json_files.load(path, Workload)


def importers_read(path):
    return importers.read("nccl-tests", path)


@pytest.mark.parametrize(
    "act",
    [lambda path: json_files.save(path, {}), json_files.check_writable, lambda path: picture.save(path, Figure())],
)
def test_only_files_are_replaced(tmp_path, act):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(InputError, match="pipe: cannot be written: is not a regular file"):
        act(pipe)
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    with pytest.raises(InputError, match="cannot be written: is a directory"):
        act(tmp_path)
    with pytest.raises(InputError, match="no path is given"):
        act("")
    under_a_file = tmp_path / "file" / "x.json"
    (tmp_path / "file").write_text("kept")
    with pytest.raises(InputError, match="x.json: cannot be written: "):
        act(under_a_file)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "pipe"]
    assert (tmp_path / "file").read_text() == "kept"


@pytest.mark.parametrize("read", [lambda path: json_files.load(path, dict), json_files.sha256, importers_read])
def test_only_files_are_read(tmp_path, read):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path in (pipe, "/dev/zero"):
        with pytest.raises(InputError, match=f"{path}: cannot be read: is not a regular file"):
            read(path)
    with pytest.raises(InputError, match="cannot be read: is a directory"):
        read(tmp_path)


def test_what_calls_itself_a_file_and_gives_nothing_is_not_waited_for(tmp_path, monkeypatch):
    """As /proc/kmsg does: here a pipe whose writer is silent."""
    os.mkfifo(tmp_path / "pipe")
    writer = os.open(tmp_path / "pipe", os.O_RDWR)
    monkeypatch.setattr("stat.S_ISREG", lambda mode: True)
    with pytest.raises(InputError, match="pipe: cannot be read: the file has no end"):
        json_files.read_bytes(tmp_path / "pipe")
    os.close(writer)


def test_a_file_that_is_not_text_is_refused_by_its_name(tmp_path):
    path = tmp_path / "t.json"
    path.write_bytes(b'{"kind": "\x88"}')
    with pytest.raises(InputError, match=r"t\.json: not valid JSON"):
        json_files.load(path, dict, versioned="cost_table")


def test_a_file_without_end_is_not_read_to_its_end(tmp_path, monkeypatch):
    monkeypatch.setattr(json_files, "MAX_FILE_BYTES", 100)
    (tmp_path / "large").write_bytes(b"0" * 101)
    with pytest.raises(InputError, match="large: larger than 100 bytes"):
        json_files.read_bytes(tmp_path / "large")
    with pytest.raises(InputError, match="larger than 100 bytes"):
        json_files.read_bytes("/proc/self/smaps")  # whose size is said to be 0


def test_a_small_file_is_read_within_a_small_limit_of_memory(tmp_path):
    """Where the address space is limited, memory for the largest file may not be there."""
    (tmp_path / "small").write_bytes(b"0" * 100)
    tracemalloc.start()
    try:
        assert len(json_files.read_bytes(tmp_path / "small")) == 100
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_looking_whether_a_place_can_be_written_changes_nothing(tmp_path):
    path = tmp_path / "new.json"
    json_files.check_writable(path)
    assert list(tmp_path.iterdir()) == []
    path.write_text("old")
    json_files.check_writable(path)
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def test_a_special_file_as_a_link_is_left_alone(tmp_path):
    link = tmp_path / "null.json"
    link.symlink_to("/dev/null")
    with pytest.raises(InputError, match="is not a regular file"):
        json_files.save(link, {})
    assert link.is_symlink()


@pytest.mark.parametrize("umask", [0o077, 0o027, 0o022])
def test_a_file_is_as_open_as_the_umask_says(tmp_path, umask):
    before = os.umask(umask)
    try:
        json_files.save(tmp_path / "new.json", {})
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "new.json").stat().st_mode) == 0o666 & ~umask


def test_a_file_that_is_written_again_keeps_its_mode(tmp_path):
    path = tmp_path / "private.json"
    path.write_text("old")
    path.chmod(0o600)
    json_files.save(path, {})
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and path.read_text() == "{}\n"


@pytest.mark.parametrize(
    ("kind", "text", "said"),
    [
        (Workload, '{"schema_version": 2, "kind": "workload", "zero_stage": 4}', "zero_stage = 4: expected 1, 2 or 3"),
        (
            Workload,
            '{"parallel": {"order": "zigzag"}}',
            "parallel.order = 'zigzag': expected '1f1b', 'gpipe', 'interleaved' or 'no_pipeline'",
        ),
        (
            Schedule,
            '{"groups": [{"algorithm": "ring"}]}',
            "groups[0].algorithm = 'ring': expected 'hierarchical' or 'symmetric'",
        ),
        (
            Schedule,
            '{"ranks": [{"steps": [{"unshard": [[0, "warp"]]}]}]}',
            "ranks[0].steps[0].unshard[0]: expected a route among gpu, cpu, cpu_shard, nvme, not 'warp'",
        ),
    ],
)
def test_a_value_out_of_few_is_named_with_those_that_there_are(kind, text, said):
    with pytest.raises(InputError) as error:
        json_files.decode(text.encode(), kind, file="f.json")
    assert str(error.value) == f"f.json: {said}"


@pytest.mark.parametrize("text", ['{"%s": 1}', '{"parallel": {"order": "%s"}}'])
def test_a_long_name_or_value_is_told_in_a_short_line(text):
    with pytest.raises(InputError) as error:
        json_files.decode((text % ("k" * 10**6)).encode(), Workload, file="f.json")
    assert len(str(error.value)) < 2100 and str(error.value).startswith("f.json: ")


def test_an_error_is_one_line_whatever_it_quotes():
    assert len(str(InputError("a\nb\rc\u2028d\x85e", file="f\x0bg")).splitlines()) == 1
