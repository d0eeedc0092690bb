"""Apply, check and revert on a toy tree, changed and not."""

import errno
import os
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import toy_megatron
from toy_megatron import append, git, snapshot

from megatron_ext.checkout import apply, check, revert, transaction, verify_hooks
from megatron_ext.checkout.hook_table import ARGUMENTS, DDP, FILES, HOOKS, MARKER, PRETRAIN, SCHEDULES, TRAINING
from megatron_ext.checkout.transaction import STAGE, locked_tree
from megatron_ext.formats.errors import InputError


def problems(report):
    """One line for every file that is neither clean nor applied."""
    return [f"{f.file}: {f.detail}" for f in report.files if f.state in ("drifted", "conflict")]


def change(root, path, old, new):
    place = root / path
    text = place.read_bytes().decode()
    assert old in text
    place.write_bytes(text.replace(old, new, 1).encode())


def test_apply_check_and_revert(archive):
    before = snapshot(archive)
    assert check(archive).state == "clean"
    assert snapshot(archive) == before
    report = apply(archive)
    assert (report.state, report.changed) == ("applied", True)
    assert {f.detail for f in report.files} == {"exact"}
    assert verify_hooks(archive) == []
    patched = snapshot(archive)
    assert sum(d.decode().count(MARKER) for d, _ in patched.values()) == len(HOOKS)
    assert patched.keys() == before.keys()
    assert not apply(archive).changed and snapshot(archive) == patched
    assert check(archive).state == "applied"
    assert revert(archive).state == "clean"
    assert snapshot(archive) == before
    assert not revert(archive).changed and snapshot(archive) == before


def test_a_dry_run_shows_the_diff_and_changes_nothing(archive):
    before = snapshot(archive)
    report = apply(archive, dry_run=True)
    assert (report.state, report.changed) == ("clean", False)
    added = [row for row in report.diff.split("\n") if row.startswith("+") and row.endswith(MARKER)]
    assert len(added) == len(HOOKS) and snapshot(archive) == before
    assert apply(archive).diff == report.diff
    patched = snapshot(archive)
    removed = revert(archive, dry_run=True).diff
    rows = [row for row in removed.split("\n") if row.startswith("-") and row.endswith(MARKER)]
    assert snapshot(archive) == patched and len(rows) == len(HOOKS)


def test_the_diff_is_what_git_would_print(clone):
    mine = apply(clone).diff
    git_says = subprocess.run(
        ["git", "-C", str(clone), "diff", "-U0", "--no-color"], capture_output=True, text=True, check=True
    ).stdout
    wanted = [r for r in git_says.split("\n") if r.startswith("+") and not r.startswith("+++")]
    got = [r for r in mine.split("\n") if r.startswith("+") and not r.startswith("+++")]
    assert sorted(got) == sorted(wanted) and not [
        r for r in git_says.split("\n") if r.startswith("-") and not r.startswith("---")
    ]


def test_local_changes_survive(archive):
    change(archive, SCHEDULES, "    chunks = len(model)\n", "    chunks = len(model)\n    note = 1\n\n")
    change(archive, TRAINING, '    log.append("loop")', '    log.append("my loop")')
    change(archive, DDP, '"""Toy data parallelism."""', '"""Mine."""\nimport os')
    before = snapshot(archive)
    report = apply(archive)
    assert {f.file for f in report.files if f.detail == "syntax tree"} == {SCHEDULES, TRAINING, DDP}
    assert report.state == "applied" and verify_hooks(archive) == []
    append(archive, TRAINING, "\n# changed afterwards\n")
    assert check(archive).state == "applied"
    revert(archive)
    expected = dict(before)
    data, mode = before[TRAINING]
    expected[TRAINING] = (data + b"\n# changed afterwards\n", mode)
    assert snapshot(archive) == expected


def test_no_git_is_needed(archive, monkeypatch):
    """A fork in a subfolder of a repository, a repository of another user, a machine without git: all the same."""
    git(archive.parent, "init", "-q")
    os.chown(archive.parent, 12345, 12345)
    append(archive, SCHEDULES, "\n# mine\n")
    monkeypatch.setenv("PATH", "")
    assert apply(archive).state == "applied" and revert(archive).changed


@pytest.mark.parametrize(
    "path, near", [(SCHEDULES, "    chunks = len(model)\n"), (DDP, "gather_with_optimizer_step = None\n")]
)
def test_comments_and_blank_lines_at_a_hook_are_no_reason_to_refuse(archive, path, near):
    change(archive, path, near, f"{near}\n        # a note\n\n    # another\n")
    before = snapshot(archive)
    assert apply(archive).state == "applied" and verify_hooks(archive) == []
    revert(archive)
    assert snapshot(archive) == before


@pytest.mark.parametrize(
    "path, old, new, reason",
    [
        (
            DDP,
            "gather_with_optimizer_step = None",
            "gather_with_optimizer_step = None\n        self.x = 1",
            r"ddp.built: __init__ \(lines 5 to 13\) does not end with .* \(line 12\) but with the statement at line 13",
        ),
        (
            TRAINING,
            "    if args.align_param_gather and args.overlap_param_gather:",
            "    if args.x:",
            r"training.setup: no `if args.overlap_param_gather and .*` in train \(lines 4 to 22\)",
        ),
        (SCHEDULES, "    total = chunks", "    total = = chunks", "does not parse in Python 3"),
        (
            ARGUMENTS,
            "def add_toy_options(",
            "def parse_args(",
            "arguments.add: 2 times def parse_args in the module, lines 5, 10; expected 1",
        ),
    ],
)
def test_a_conflict_changes_nothing_and_names_hook_and_lines(archive, path, old, new, reason):
    change(archive, path, old, new)
    before = snapshot(archive)
    state = check(archive)
    assert state.state == "conflict" and path in problems(state)[0]
    for dry_run in (False, True):
        with pytest.raises(InputError, match=f"nothing was changed: {path}: {reason}.*this is megatron-core 0.77.3"):
            apply(archive, dry_run=dry_run)
    assert snapshot(archive) == before


def test_drift_names_the_file_and_the_hook(archive):
    apply(archive)
    place = archive / SCHEDULES
    rows = place.read_text().split("\n")
    rows.remove(next(r for r in rows if "post_backward" in r and MARKER in r))
    place.write_text("\n".join(rows))
    report = check(archive)
    assert report.state == "drifted"
    assert problems(report) == [f"{SCHEDULES}: schedules.interleaved.post_backward: not in its place"]
    assert verify_hooks(archive) == problems(report)


def test_a_half_applied_tree_says_what_to_do(archive):
    apply(archive)
    (archive / DDP).write_text(toy_megatron.TEXTS[DDP])
    before = snapshot(archive)
    assert check(archive).state == "drifted"
    with pytest.raises(
        InputError, match=rf"{len(HOOKS) - 1} of {len(HOOKS)} hook lines are there\); run `megatron-ext patch revert"
    ):
        apply(archive)
    assert snapshot(archive) == before
    revert(archive)
    assert apply(archive).state == "applied"


def test_revert_leaves_lines_of_the_owner_that_end_in_the_same_mark(archive):
    own = f"\n\ndef mine(gather_schedule):\n    megatron_ext = 1  {MARKER}\n    return megatron_ext  {MARKER}\n"
    append(archive, SCHEDULES, own)
    before = snapshot(archive)
    apply(archive)
    assert check(archive).state == "applied"
    revert(archive)
    assert snapshot(archive) == before


def test_a_copied_hook_line_stops_revert(archive):
    apply(archive)
    copy = f"\n\ndef mine(gather_schedule):\n    gather_schedule.end_iteration()  {MARKER}\n    return 1\n"
    append(archive, SCHEDULES, copy)
    assert "is not where its hook belongs" in problems(check(archive))[0]
    now = snapshot(archive)
    with pytest.raises(InputError, match=r"lines 27, 89, 115, 122 are the same hook line, which belongs in 3 places"):
        revert(archive)
    assert snapshot(archive) == now


@pytest.mark.parametrize(
    ("line", "edited"),
    [
        (f"hooks.on_ddp_built(self)  {MARKER}", "hooks.on_ddp_built(self)"),
        ("hooks; hooks.on_ddp_built(self)", "hooks\n\n        hooks.on_ddp_built(self)"),  # black, ruff format
    ],
)
def test_an_edited_hook_line_stops_revert(archive, line, edited):
    apply(archive)
    change(archive, DDP, line, edited)
    before = snapshot(archive)
    report = check(archive)
    assert report.state == "drifted" and "a hook line was edited by hand" in problems(report)[0]
    with pytest.raises(InputError, match="edited by hand"):
        revert(archive)
    assert snapshot(archive) == before


def test_an_owners_own_calls_into_hooks_stay(archive):
    """README asks for them where code of the owner's reads or changes parameters between iterations."""
    apply(archive)
    own = (
        "import megatron_ext.megatron.hooks\ndef owners():\n    "
        "megatron_ext.megatron.hooks.unshard_all()\n    megatron_ext.megatron.hooks.params_changed()\n"
    )
    append(archive, TRAINING, own)
    change(
        archive,
        TRAINING,
        '    log.append("train")\n',
        '    megatron_ext.megatron.hooks.unshard_all()\n    log.append("train")\n',
    )
    assert verify_hooks(archive) == []
    revert(archive)
    kept = (archive / TRAINING).read_bytes().decode()
    assert own in kept and kept.count("unshard_all") == 2 and MARKER not in kept


@pytest.mark.parametrize(
    ("old", "new", "said"), [(b"\n", b"\r\n", "core.autocrlf"), (b"", b"\xef\xbb\xbf", "byte-order mark")]
)
def test_windows_line_ends_and_marks(archive, old, new, said):
    place = archive / TRAINING
    text = place.read_bytes()
    place.write_bytes(text.replace(old, new) if old else new + text)
    before = snapshot(archive)
    for verb in (check, apply, revert):
        with pytest.raises(InputError, match=said):
            verb(archive)
    assert snapshot(archive) == before


def test_a_read_only_file(archive):
    (archive / TRAINING).chmod(0o444)
    before = snapshot(archive)
    for dry_run in (False, True):
        with pytest.raises(InputError, match="chmod u.w"):
            apply(archive, dry_run=dry_run)
    assert snapshot(archive) == before
    (archive / TRAINING).chmod(0o644)
    apply(archive)
    (archive / TRAINING).chmod(0o444)
    with pytest.raises(InputError, match="chmod u.w"):
        revert(archive)
    assert check(archive).state == "applied"


def test_not_a_tree(archive, tmp_path):
    with pytest.raises(InputError, match="not a Megatron tree; give the directory"):
        check(tmp_path)
    with pytest.raises(InputError, match=f"not a Megatron tree; give {archive}"):
        check(archive / "megatron" / "core")
    with pytest.raises(InputError, match="nowhere: no such directory"):
        check(tmp_path / "nowhere")


def test_a_release_without_one_of_the_core_files(archive):
    (archive / DDP).unlink()
    with pytest.raises(InputError, match="megatron-core 0.77.3 has no such file"):
        check(archive)


def test_a_core_only_tree(tmp_path, toy_release):
    toy_megatron.write(tmp_path, core_only=True)
    before = snapshot(tmp_path)
    report = apply(tmp_path)
    assert report.core_only and PRETRAIN in report.absent and report.state == "applied"
    assert verify_hooks(tmp_path) == []
    assert revert(tmp_path).state == "clean" and snapshot(tmp_path) == before


def test_modes_and_links_are_kept(archive, tmp_path):
    (archive / PRETRAIN).chmod(0o755)
    real = tmp_path / "real.py"
    (archive / DDP).rename(real)
    (archive / DDP).symlink_to(real)
    before = snapshot(archive)
    apply(archive)
    assert (archive / DDP).is_symlink() and MARKER in real.read_text()
    assert (archive / PRETRAIN).stat().st_mode & 0o777 == 0o755
    revert(archive)
    assert snapshot(archive) == before and (archive / DDP).is_symlink()


def test_owners_are_kept(archive):
    """Where the tests run as root, as in a container, files of other users stay theirs."""
    root = os.geteuid() == 0
    for number, path in enumerate(FILES):
        if root:
            os.chown(archive / path, 1000 + number, 2000)
    owners = {path: ((archive / path).stat().st_uid, (archive / path).stat().st_gid) for path in FILES}
    for verb in (apply, revert):
        assert verb(archive).changed
        assert owners == {path: ((archive / path).stat().st_uid, (archive / path).stat().st_gid) for path in FILES}


def test_an_owner_that_cannot_be_kept_is_refused(archive, monkeypatch):
    def refuse(*_):
        raise PermissionError

    monkeypatch.setattr(transaction.os, "chown", refuse)
    real = os.stat(archive / DDP)
    other = os.stat_result((*real[:4], 4321, *real[5:]))
    monkeypatch.setattr(
        transaction.Path, "stat", lambda place, **_: other if place.name == DDP.split("/")[-1] else real
    )
    before = {path: (archive / path).read_bytes() for path in FILES}
    with pytest.raises(InputError, match="this user cannot keep the owner .user 4321"):
        transaction.replace_files(archive, {DDP: b"x"})
    assert before == {path: (archive / path).read_bytes() for path in FILES}


def test_a_link_to_another_file_system(archive, tmp_path, monkeypatch):
    real, folder = os.replace, tmp_path / "elsewhere"
    folder.mkdir()
    (archive / DDP).rename(folder / "ddp.py")
    (archive / DDP).symlink_to(folder / "ddp.py")

    def replace(source, target):
        if (folder in Path(source).parents) != (folder in Path(target).parents):
            raise OSError(errno.EXDEV, "Invalid cross-device link")
        real(source, target)

    monkeypatch.setattr(os, "replace", replace)
    before = snapshot(archive)
    assert apply(archive).state == "applied" and MARKER in (folder / "ddp.py").read_text()
    assert (archive / DDP).is_symlink() and [p.name for p in folder.iterdir()] == ["ddp.py"]
    revert(archive)
    assert snapshot(archive) == before


def test_two_commands_at_once_take_turns(archive, monkeypatch):
    with ThreadPoolExecutor() as pool:
        with locked_tree(archive):
            waiting = pool.submit(apply, archive)
            time.sleep(0.2)
            assert not waiting.done()
        assert waiting.result().state == "applied"
    monkeypatch.setattr(transaction, "WAIT_SECONDS", 0.1)
    with locked_tree(archive), pytest.raises(InputError, match="another patch command"):
        check(archive)


def test_a_stage_is_never_left(archive):
    apply(archive)
    revert(archive)
    assert not (archive / STAGE).exists()
