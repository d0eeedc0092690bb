"""A patch command that dies leaves the tree as before or applied, after the next command at the latest."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from toy_megatron import snapshot

from megatron_ext.checkout import apply, check, revert
from megatron_ext.checkout.hook_table import DDP, FILES
from megatron_ext.checkout.transaction import STAGE, locked_tree, replace_files
from megatron_ext.formats.errors import InputError

DIE = """
import os, sys
from pathlib import Path
from megatron_ext.checkout import transaction
root, texts, at = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
calls = 0
def dying(real):
    def call(*arguments, **keywords):
        global calls
        calls += 1
        if calls == at:
            os._exit(9)
        return real(*arguments, **keywords)
    return call
os.replace, os.fsync, os.mkdir, os.unlink = map(dying, (os.replace, os.fsync, os.mkdir, os.unlink))
contents = {p: (root / p).read_bytes() + b"# new" for p in texts.split(",")}
transaction.replace_files(root, contents, rehearse=len(sys.argv) > 4)
print(calls)
"""


def die(root: Path, at: int, *rehearse: str) -> subprocess.CompletedProcess:
    """Replace all files in a process that ends at the ``at``-th change of the disk."""
    return subprocess.run(
        [sys.executable, "-c", DIE, str(root), ",".join(FILES), str(at), *rehearse], capture_output=True, text=True
    )


def test_death_at_every_moment(archive):
    before = snapshot(archive)
    after = {p: (d + b"# new" if p in FILES else d, m) for p, (d, m) in before.items()}
    seen, at = [], 0
    while True:
        at += 1
        result = die(archive, at)
        if result.returncode == 0:
            break
        assert result.returncode == 9, result.stderr
        with locked_tree(archive) as repaired:
            seen.append(repaired)
        assert not (archive / STAGE).exists()
        now = snapshot(archive)
        assert now in (before, after)
        # What is said is what was done; None where the process died before or after it all.
        assert {"dropped": before, "finished": after}.get(seen[-1], now) == now
        for path in FILES:
            (archive / path).write_bytes(before[path][0])
    assert at > 2 * len(FILES) and {"dropped", "finished"} <= set(seen)


@pytest.mark.parametrize("verb", [apply, check, revert])
def test_the_next_command_repairs(archive, verb):
    assert die(archive, 1000).returncode == 0
    for path in FILES:  # a journal and all staged files, as just before the first rename
        text = (archive / path).read_bytes()
        (archive / path).write_bytes(text.removesuffix(b"# new"))
    before = snapshot(archive)
    (archive / STAGE).mkdir()
    (archive / STAGE / "0").write_bytes(b"half a fi")
    report = verb(archive)
    assert report.repaired == "dropped" and not (archive / STAGE).exists()
    if verb is not apply:
        assert snapshot(archive) == before


def test_a_dry_run_that_dies_is_not_carried_out_later(archive):
    before = snapshot(archive)
    calls = int(die(archive, 0, "rehearse").stdout)
    for at in range(calls - 8, calls + 1):
        assert die(archive, at, "rehearse").returncode == 9
        check(archive)
        assert snapshot(archive) == before


def test_a_file_changed_in_between_is_not_overwritten(archive):
    result = die(archive, 1000)
    total = int(result.stdout)
    for path in FILES:
        text = (archive / path).read_bytes()
        (archive / path).write_bytes(text.removesuffix(b"# new"))
    die(archive, total - 5)  # some files are renamed, some are not
    assert (archive / STAGE).is_dir()
    (archive / DDP).write_bytes(b"# mine\n")
    before = snapshot(archive)
    with pytest.raises(InputError, match="changed after a patch command was interrupted"):
        check(archive)
    assert snapshot(archive) == before


def test_a_failing_rename_undoes_the_others(archive, monkeypatch):
    before = snapshot(archive)
    real, calls = os.replace, []

    def failing(source, target):
        calls.append(target)
        if len(calls) == 4:  # the journal is the first
            raise PermissionError("no")
        return real(source, target)

    monkeypatch.setattr(os, "replace", failing)
    with pytest.raises(InputError, match="nothing was changed"):
        replace_files(archive, dict.fromkeys(FILES, b"new"))
    assert snapshot(archive) == before and len(calls) > 4
