"""Apply, check and revert on a toy tree: with and without history, changed and not."""

import json
import subprocess

import pytest
import toy_megatron
from toy_megatron import git, snapshot

from megatron_ext import cli
from megatron_ext.checkout import apply, check, revert, verify_hooks
from megatron_ext.checkout.hook_table import DDP, FILES, HOOKS, MARKER, PRETRAIN, SCHEDULES, TRAINING
from megatron_ext.checkout.transaction import STAGE, locked
from megatron_ext.errors import InputError


def append(root, path, text):
    place = root / path
    place.write_bytes(place.read_bytes() + text.encode())


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
    assert sorted(got) == sorted(wanted) and not [r for r in git_says.split("\n") if r.startswith("-") and not r.startswith("---")]


def test_local_changes_are_merged_in_a_clone_and_survive(clone):
    change(clone, SCHEDULES, "    chunks = len(model)\n", "    chunks = len(model)\n    note = 1\n\n")
    change(clone, TRAINING, "    log.append(\"loop\")", "    log.append(\"my loop\")")
    change(clone, DDP, '"""Toy data parallelism."""', '"""Mine."""\nimport os')
    before = snapshot(clone)
    report = apply(clone)
    assert {f.file for f in report.files if f.detail == "merged"} == {SCHEDULES, TRAINING, DDP}
    assert report.state == "applied" and verify_hooks(clone) == []
    append(clone, TRAINING, "\n# changed afterwards\n")
    assert check(clone).state == "applied"
    revert(clone)
    expected = dict(before)
    data, mode = before[TRAINING]
    expected[TRAINING] = (data + b"\n# changed afterwards\n", mode)
    assert snapshot(clone) == expected


def test_local_changes_are_refused_without_history(archive):
    append(archive, SCHEDULES, "\n# mine\n")
    before = snapshot(archive)
    report = check(archive)
    assert report.state == "conflict" and "no" in report.problems()[0]
    with pytest.raises(InputError, match=rf"{SCHEDULES}.*use a git clone"):
        apply(archive)
    assert snapshot(archive) == before


def test_history_of_a_repository_around_the_tree_is_not_taken_for_its_own(archive):
    git(archive.parent, "init", "-q")
    append(archive, SCHEDULES, "\n# mine\n")
    with pytest.raises(InputError, match="use a git clone"):
        apply(archive)


@pytest.mark.parametrize(
    "path, old, new",
    [
        (DDP, "gather_with_optimizer_step = None", "gather_with_optimizer_step = 1"),  # touches
        (TRAINING, "    if args.align_param_gather and args.overlap_param_gather:", "    if args.x:"),
        (SCHEDULES, "    def backward_step_helper(", "    def backward_helper("),
        (SCHEDULES, "    total = chunks", "    total = = chunks"),  # does not parse
    ],
)
def test_a_conflict_changes_nothing(clone, path, old, new):
    change(clone, path, old, new)
    before = snapshot(clone)
    state = check(clone)
    if state.state == "clean":  # the helper's own name is no part of its place
        assert path == SCHEDULES and apply(clone).state == "applied"
        return
    assert state.state == "conflict" and path in state.problems()[0]
    with pytest.raises(InputError, match="nothing was changed"):
        apply(clone)
    assert snapshot(clone) == before


def test_drift_names_the_file_and_the_hook(archive):
    apply(archive)
    place = archive / SCHEDULES
    rows = place.read_text().split("\n")
    rows.remove(next(r for r in rows if "post_backward" in r and MARKER in r))
    place.write_text("\n".join(rows))
    report = check(archive)
    assert report.state == "drifted"
    assert report.problems() == [f"{SCHEDULES}: schedules.interleaved.post_backward: not in its place"]
    assert [str(p) for p in verify_hooks(archive)] == report.problems()


def test_a_half_applied_tree_says_what_to_do(archive):
    apply(archive)
    (archive / DDP).write_text(toy_megatron.TEXTS[DDP])
    before = snapshot(archive)
    assert check(archive).state == "drifted"
    with pytest.raises(InputError, match=rf"{len(HOOKS) - 1} of {len(HOOKS)} hook lines are there\); run `megatron-ext patch revert"):
        apply(archive)
    assert snapshot(archive) == before
    revert(archive)
    assert apply(archive).state == "applied"


def test_an_older_version_of_us_is_reverted_like_this_one(archive):
    before = snapshot(archive)
    line = f"    from megatron_ext.megatron import hooks; hooks.old(model)  {MARKER}\n"
    change(archive, TRAINING, '    log.append("train")\n', f'{line}    log.append("train")\n')
    with pytest.raises(InputError, match="another megatron-ext version.*patch revert"):
        apply(archive)
    revert(archive)
    assert snapshot(archive) == before


def test_an_edited_hook_line_stops_revert(archive):
    apply(archive)
    change(archive, DDP, f"hooks.on_ddp_built(self)  {MARKER}", "hooks.on_ddp_built(self)")
    before = snapshot(archive)
    assert check(archive).state == "drifted"
    with pytest.raises(InputError, match="edited by hand"):
        revert(archive)
    assert snapshot(archive) == before


def test_an_owners_own_calls_into_hooks_stay(archive):
    """README asks for them where code of the owner's reads or changes parameters between iterations."""
    apply(archive)
    own = "import megatron_ext.megatron.hooks\ndef owners():\n    megatron_ext.megatron.hooks.make_whole()\n    megatron_ext.megatron.hooks.params_changed()\n"
    append(archive, TRAINING, own)
    change(archive, TRAINING, '    log.append("train")\n', '    megatron_ext.megatron.hooks.make_whole()\n    log.append("train")\n')
    assert verify_hooks(archive) == []
    revert(archive)
    kept = (archive / TRAINING).read_bytes().decode()
    assert own in kept and kept.count("make_whole") == 2 and MARKER not in kept


def test_windows_line_ends(archive):
    place = archive / TRAINING
    place.write_bytes(place.read_bytes().replace(b"\n", b"\r\n"))
    before = snapshot(archive)
    for verb in (check, apply, revert):
        with pytest.raises(InputError, match="core.autocrlf"):
            verb(archive)
    assert snapshot(archive) == before


def test_a_read_only_file(archive):
    (archive / TRAINING).chmod(0o444)
    before = snapshot(archive)
    with pytest.raises(InputError, match="chmod u.w"):
        apply(archive)
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


def test_an_unknown_version(archive):
    for path in FILES:
        append(archive, path, "\n# another release\n")
    with pytest.raises(InputError, match=r"differs from every known release \(0.9.0 to main\)"):
        apply(archive)


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


def test_two_commands_at_once(archive):
    with locked(archive), pytest.raises(InputError, match="another patch command"):
        apply(archive)
    assert apply(archive).state == "applied"


def test_the_command(archive, capsys):
    for verb, state in [("check", "clean"), ("apply", "applied"), ("check", "applied"), ("revert", "clean")]:
        assert cli.main(["patch", verb, str(archive), "--json"]) == 0
        out, err = capsys.readouterr()
        assert json.loads(out)["state"] == state and state in err
    assert cli.main(["patch", "apply", str(archive), "--dry-run"]) == 0
    assert capsys.readouterr().out.count(MARKER) == len(HOOKS)
    assert cli.main(["patch", "list", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert len(listed["hooks"]) == len(HOOKS) and "0.16.1" in [r["version"] for r in listed["releases"]]
    assert cli.main(["patch", "list", str(archive)]) == 0
    assert "local changes" in capsys.readouterr().out
    append(archive, DDP, "\n# mine\n")
    assert cli.main(["patch", "apply", str(archive), "--json"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and DDP in err


def test_checking_a_tree_that_is_not_as_it_should_be_ends_with_1(archive, capsys):
    apply(archive)
    (archive / DDP).write_text(toy_megatron.TEXTS[DDP])
    assert cli.main(["patch", "check", str(archive)]) == 1
    assert "drifted" in capsys.readouterr().out
    revert(archive)
    append(archive, DDP, "\n# mine\n")  # and no history to merge from
    assert cli.main(["patch", "check", str(archive)]) == 1
    assert "conflict" in capsys.readouterr().out


def test_a_stage_is_never_left(archive):
    apply(archive)
    revert(archive)
    assert not (archive / STAGE).exists()


def protect(root):
    (root / TRAINING).chmod(0o444)


def windows(root):
    (root / DDP).write_bytes((root / DDP).read_bytes().replace(b"\n", b"\r\n"))


def half(root):
    apply(root)
    (root / DDP).write_text(toy_megatron.TEXTS[DDP])


def older(root):
    line = f"    from megatron_ext.megatron import hooks; hooks.old(model)  {MARKER}\n"
    change(root, TRAINING, '    log.append("train")\n', f'{line}    log.append("train")\n')


def unknown(root):
    for path in FILES:
        append(root, path, "\n# another release\n")


def no_tree(root):
    (root / "megatron/core/package_info.py").unlink()


@pytest.mark.parametrize(
    "spoil, names, advice",
    [
        (no_tree, "not a Megatron tree", "give the directory that holds megatron/core"),
        (unknown, "differs from every known release", "use a git clone, or an unchanged release"),
        (half, f"{len(HOOKS) - 1} of {len(HOOKS)} hook lines", "patch revert"),
        (older, "another megatron-ext version", "patch revert"),
        (protect, TRAINING, "chmod u+w"),
        (windows, DDP, "core.autocrlf"),
    ],
)
def test_bad_input_is_one_line_that_says_what_to_do(spoil, names, advice, archive, capsys):
    spoil(archive)
    before = snapshot(archive)
    assert cli.main(["patch", "apply", str(archive)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and err.startswith("megatron-ext: ")
    assert names in err and advice in err and snapshot(archive) == before
