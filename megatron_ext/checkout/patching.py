"""Apply, check and revert: what ``megatron-ext patch`` does to a Megatron tree."""

import difflib
from dataclasses import dataclass, field

from megatron_ext.checkout.hook_table import HOOKS, hooks_of
from megatron_ext.checkout.patchset import known_releases, manifest
from megatron_ext.checkout.place_hooks import place_hooks
from megatron_ext.checkout.syntax import PlaceError
from megatron_ext.checkout.transaction import locked_tree, replace_files
from megatron_ext.checkout.tree import Tree
from megatron_ext.checkout.verify import EDITED, edited_line, hook_numbers, strip_hooks, verify_text
from megatron_ext.formats.errors import InputError


@dataclass
class FileState:
    """One file that carries hooks.

    Attributes:
        file: path below the root.
        state: ``clean`` (no hook is there, and all can be placed), ``applied``, ``drifted`` (hooks are
            there but not all in their place) or ``conflict`` (no hook is there, and they cannot be placed).
        detail: how the hooks are or would be placed (``exact`` or ``syntax tree``), if that is
            known; otherwise what is wrong.
        lines: numbers of the hook lines; for a clean file, the numbers that they would have.
    """

    file: str
    state: str
    detail: str = ""
    lines: list[int] = field(default_factory=list)


@dataclass
class TreeReport:
    """State of a tree; ``state`` is one of clean, applied, drifted, conflict.

    ``diff`` is the change that was made, or in a dry run would be made, as a diff without context.
    ``repaired`` says what was done about an interrupted earlier command (``finished``, ``dropped``).
    """

    path: str
    version: str
    state: str
    core_only: bool
    absent: list[str]
    files: list[FileState] = field(default_factory=list)
    changed: bool = False
    repaired: str | None = None
    diff: str = ""


def check(path) -> TreeReport:
    """The state of the tree at ``path``; changes nothing, except to repair an interrupted command.

    Raises:
        InputError: not a Megatron tree, Windows line ends, or a file that cannot be read.
    """
    tree = Tree(path)
    with locked_tree(tree.root) as repaired:
        return _examine(tree, repaired)[0]


def apply(path, *, dry_run: bool = False) -> TreeReport:
    """Insert the hooks. A tree that has all of them stays as it is.

    Args:
        path: root of the tree.
        dry_run: only report what would be done. Raises the same errors as a real run.

    Raises:
        InputError: as in :func:`check`, and if the hooks cannot be placed, if only some of them are there, or
            if a file is read-only. The tree is then unchanged.
    """
    tree = Tree(path)
    with locked_tree(tree.root) as repaired:
        report, patched = _examine(tree, repaired)
        contents = {f: new.encode() for f, new in patched.items()}
        if report.state == "applied":
            return report
        if report.state == "drifted":
            count = sum(len(hook_numbers(tree.read(f))) for f in tree.present)
            expected = sum(len(hooks_of(f)) for f in tree.present)
            said = f"{_first(report, 'drifted')} ({count} of {expected} hook lines are there); run `megatron-ext patch "
            raise InputError(f"{said}revert {path}`, then apply again", file=path)
        if report.state == "conflict":
            raise InputError(f"nothing was changed: {_first(report, 'conflict')}", file=path)
        report.diff = "".join(_diff(f, tree.read(f), new) for f, new in patched.items())
        _replace(tree, contents, dry_run)
        if not dry_run:
            assert all((tree.root / f).read_bytes() == data for f, data in contents.items())
            report.changed, report.state = True, "applied"
            for entry in report.files:
                entry.state = "applied"
        return report


def revert(path, *, dry_run: bool = False) -> TreeReport:
    """Take out the lines that ``apply`` wrote.

    The lines are recognized by their whole text. Everything else stays, so the tree is byte for byte as it was before.

    Raises:
        InputError: as in :func:`check`, a file that cannot be written, a hook line that was
            edited, or copies of a hook line. The tree is then unchanged.
    """
    tree = Tree(path)
    with locked_tree(tree.root) as repaired:
        stripped, diff = {}, ""
        for file in tree.present:
            text = tree.read(file)
            try:
                clean = strip_hooks(file, text)
            except PlaceError as error:
                raise InputError(str(error), file=tree.root / file) from None
            edited = edited_line(file, text)
            if edited:
                raise InputError(
                    f"line {edited}: {EDITED}; delete it and its import, then revert again", file=tree.root / file
                )
            if clean != text:
                stripped[file] = clean.encode()
                diff += _diff(file, text, clean)
        if stripped:
            _replace(tree, stripped, dry_run)
        report, _ = _examine(tree, repaired)
        report.changed, report.diff = bool(stripped) and not dry_run, diff
        return report


def _replace(tree: Tree, contents: dict[str, bytes], dry_run: bool) -> None:
    for file in contents:
        tree.check_writable(file)
    replace_files(tree.root, contents, rehearse=dry_run)


def _examine(tree: Tree, repaired: str | None) -> tuple[TreeReport, dict[str, str]]:
    """The report, and the patched text of every file that has no hook yet and in which the hooks can be placed."""
    report = TreeReport(str(tree.root), tree.version, "", tree.core_only, list(tree.absent), repaired=repaired)
    patched = {}
    for file in tree.present:
        text = tree.read(file)
        if hook_numbers(text) or edited_line(file, text):
            problems = verify_text(file, text)
            state = "drifted" if problems else "applied"
            report.files.append(FileState(file, state, "; ".join(problems), hook_numbers(text)))
            continue
        try:
            patched[file], how = place_hooks(file, text)
        except PlaceError as error:
            reason, known = str(error).removeprefix(f"{file} "), {release.version for release in manifest().releases}
            if tree.version not in known:
                reason += f" (this is megatron-core {tree.version}; known are {known_releases()})"
            report.files.append(FileState(file, "conflict", reason))
        else:
            report.files.append(FileState(file, "clean", how, hook_numbers(patched[file])))
    states = {f.state for f in report.files}
    if states == {"applied"}:
        report.state = "applied"
    elif "applied" in states or "drifted" in states:
        report.state = "drifted"
        for entry in report.files:
            if entry.state in ("clean", "conflict"):
                entry.state, entry.detail = "drifted", _NO_HOOK
    else:
        report.state = "conflict" if "conflict" in states else "clean"
    return report, patched


_NO_HOOK = "has no hooks, but other files have"


def _first(report: TreeReport, state: str) -> str:
    """The first problem. A hook in a wrong place comes before a file without hooks, because it says more."""
    found = sorted((f for f in report.files if f.state == state), key=lambda f: f.detail == _NO_HOOK)
    return f"{found[0].file}: {found[0].detail}"


def _diff(file: str, before: str, after: str) -> str:
    """A diff without context lines, as git would print it."""
    rows = difflib.unified_diff(before.split("\n"), after.split("\n"), f"a/{file}", f"b/{file}", n=0, lineterm="")
    return "".join(f"{row}\n" for row in rows)


assert len({hook.name for hook in HOOKS}) == len(HOOKS)
