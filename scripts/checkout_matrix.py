"""Patch, verify and revert many trees without training: releases, drawn commits, heads of forks.

See test_checkouts.sh. Only the files of a tree that carry hooks are extracted. In addition to the tool's own
verification there is a second check: next to each hook line there must be a statement that some release has next to the
same hook. Statements are compared by their heads (the test of an ``if``, not its body).
"""

import ast
import random
import subprocess
import tempfile
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from megatron_ext import checkout
from megatron_ext.checkout.hook_table import ARGUMENTS, DDP, FILES, HOOKS, OPTIMIZER, PRETRAIN, SCHEDULES, TRAINING
from megatron_ext.checkout.patchset import known_files, manifest
from megatron_ext.checkout.tree import Tree
from megatron_ext.checkout.verify import hook_lines
from megatron_ext.formats.errors import InputError

PACKAGE_INFO = "megatron/core/package_info.py"
SIGNS = {
    DDP: ["self.overlap_param_gather_with_optimizer_step ="],
    OPTIMIZER: ["super().step_with_ready_grads("],
    SCHEDULES: ["config.param_sync_func is not None", "config.finalize_model_grads_func"],
    ARGUMENTS: ["extra_args_provider"],
    TRAINING: ["args.align_param_gather"],
    PRETRAIN: ["import torch"],
}
"""Text that a file must contain to have the places of its hooks. A tree without it is older, or not a full Megatron."""
FIRST = "core_v0.12.0"
"""Commits are drawn from main's history since this tag."""

Neighbours = dict[str, set[str]]
"""Name of a hook -> heads of statements that stand before or after it."""


@dataclass
class Source:
    """One tree in a repository.

    Attributes:
        repository: git directory.
        commit: full id.
        prefix: folder of the tree inside the repository, with a slash at its end, or "".
        group: ``release``, ``commit`` or the name of a fork.
        label: tag or branch.
        blobs: path below the prefix -> blob id, of :data:`FILES` and the version's file.
    """

    repository: str
    commit: str
    prefix: str
    group: str
    label: str
    blobs: dict[str, str]


@dataclass
class Outcome:
    """The result for one tree.

    Attributes:
        version: the version that megatron/core states.
        date: date of the commit.
        state: ``placed``, ``refused``, ``old`` (it cannot have the hooks' places) or ``FAILED``.
        how: why the hooks were not placed.
        exact: how many of its files are those of a release; in the others hooks were placed by the syntax tree.
        neighbours: the statements next to each hook, for the second check.
    """

    version: str
    date: str
    state: str
    how: str = ""
    exact: int = 0
    neighbours: Neighbours = field(default_factory=dict)


def git(repository, *arguments: str) -> bytes:
    """Output of one git command."""
    return subprocess.run(["git", "-C", str(repository), *arguments], check=True, stdout=subprocess.PIPE).stdout


def sources_at(repository, commit: str, group: str, label: str) -> list[Source]:
    """Every Megatron tree in one commit, in any folder."""
    listed = git(repository, "ls-tree", "-r", "--full-tree", commit).decode(errors="replace").splitlines()
    blobs = {row.partition("\t")[2]: row.split()[2] for row in listed if " blob " in row}
    found = []
    for path in blobs:
        if path == PACKAGE_INFO or path.endswith(f"/{PACKAGE_INFO}"):
            prefix = path.removesuffix(PACKAGE_INFO)
            files = {f: blobs[prefix + f] for f in (*FILES, PACKAGE_INFO) if prefix + f in blobs}
            found.append(Source(str(repository), commit, prefix, group, label, files))
    return found


def releases(mirror) -> list[Source]:
    """The releases that the patches were made for."""
    return [s for r in manifest().releases for s in sources_at(mirror, r.commit, "release", r.ref)]


def drawn_commits(mirror, count: int, seed: int) -> list[Source]:
    """Commits of main's first-parent history since :data:`FIRST`, drawn with ``seed``."""
    history = git(mirror, "rev-list", "--first-parent", f"{FIRST}..main").decode().split()
    drawn = random.Random(seed).sample(history, min(count, len(history)))
    return [s for commit in drawn for s in sources_at(mirror, commit, "commit", commit[:10])]


def heads(repository, seen: set) -> list[Source]:
    """The trees of all branches of a fork, its main branch first. Other branches are left out if ``seen`` has them."""
    name = Path(repository).resolve()
    name = name.parent.name if name.name in ("repo", ".git") else name.name.removesuffix(".git")
    rows = git(repository, "for-each-ref", "--format=%(objectname) %(refname:lstrip=2)", "refs/heads", "refs/remotes")
    first = f"{git(repository, 'rev-parse', 'HEAD').decode().strip()} HEAD"
    found = []
    for row in [first, *rows.decode().splitlines()]:
        commit, label = row.split(" ", 1)
        for source in sources_at(repository, commit, name.replace("+", "/"), label):
            key = tuple(sorted(source.blobs.items()))
            if key not in seen or label == "HEAD":
                seen.add(key)
                found.append(source)
    return found


def try_tree(source: Source) -> Outcome:
    """Patch, verify and revert one tree in a directory of its own."""
    date = git(source.repository, "show", "-s", "--format=%cs", source.commit).decode().strip()
    files = {f: git(source.repository, "cat-file", "blob", blob) for f, blob in source.blobs.items()}
    with tempfile.TemporaryDirectory() as scratch:
        for path, data in files.items():
            place = Path(scratch, path)
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(data)
        try:
            version = Tree(scratch).version
        except InputError:
            return Outcome("", date, "old", "a file that carries hooks is absent")
        missing = [f for f, signs in SIGNS.items() if any(sign.encode() not in files.get(f, b"") for sign in signs)]
        if missing:
            return Outcome(version, date, "old", f"older than the places in {missing[0]}")
        return _patch(Path(scratch), files, version, date)


def _patch(tree: Path, files: dict[str, bytes], version: str, date: str) -> Outcome:
    def unchanged() -> bool:
        return all((tree / path).read_bytes() == data for path, data in files.items())

    try:
        report = checkout.apply(tree)
    except InputError as error:
        reason = str(error).partition("nothing was changed: ")[2].partition(" (this is megatron-core")[0]
        return Outcome(version, date, "refused" if unchanged() else "FAILED", reason or str(error))
    how = Counter(entry.detail for entry in report.files)
    if checkout.verify_hooks(tree):
        return Outcome(version, date, "FAILED", checkout.verify_hooks(tree)[0])
    beside = {}
    for path in FILES:
        beside |= neighbours(path, (tree / path).read_text())
    if checkout.revert(tree).state != "clean" or not unchanged():
        return Outcome(version, date, "FAILED", "not the same bytes after revert")
    return Outcome(version, date, "placed", exact=how["exact"], neighbours=beside)


def neighbours(file: str, text: str) -> Neighbours:
    """The heads of the statements before and after every hook of a patched file."""
    names = {number: gap.hook.name for number, gap in hook_lines(file, text).items()}
    found: Neighbours = {name: set() for name in names.values()}
    for node in ast.walk(ast.parse(text)):
        for part in ("body", "orelse", "finalbody"):
            body = getattr(node, part, None)
            if not isinstance(body, list):
                continue
            for index, statement in enumerate(body):
                name = names.get(statement.lineno)
                if name is not None:
                    around = body[max(0, index - 1) : index] + body[index + 1 : index + 2]
                    found[name] |= {_head(s) for s in around if s.lineno not in names}
    return found


def _head(statement: ast.stmt) -> str:
    """Text of a statement without its bodies."""
    fields = ("name", "args", "test", "target", "iter", "items", "value", "targets", "names", "module")
    parts = [getattr(statement, name) for name in fields if hasattr(statement, name)]
    return type(statement).__name__ + " ".join(map(_dump, parts))


def _dump(part) -> str:
    if isinstance(part, list):
        return "[" + " ".join(map(_dump, part)) + "]"
    return ast.dump(part) if isinstance(part, ast.AST) else str(part)


def beside_known(outcome: Outcome, known: Neighbours) -> int:
    """How many hooks stand next to a statement that a release has next to the same hook."""
    return sum(bool(heads & known.get(name, set())) for name, heads in outcome.neighbours.items())


def run(mirror, commits: int, seed: int, forks: list[Path], at: list[str]) -> int:
    """Try all trees and print the tables in Markdown. Returns 1 if a tree failed, or if a hook stands next to no known
    statement."""
    assert known_files()  # read once, before processes are forked
    trees = [*releases(mirror), *drawn_commits(mirror, commits, seed)]
    trees += [s for ref in at for s in sources_at(mirror, ref, "named", ref)]
    seen: set = set()
    trees += [source for fork in forks for source in heads(fork, seen)]
    with ProcessPoolExecutor() as pool:
        outcomes = list(zip(trees, pool.map(try_tree, trees, chunksize=4), strict=True))
    known: Neighbours = {}
    for source, outcome in outcomes:
        if source.group == "release":
            for name, found in outcome.neighbours.items():
                known.setdefault(name, set()).update(found)
    for group, title in (("release", "release"), ("commit", "drawn commit"), ("named", "named commit")):
        _print_trees(title, [(s, o) for s, o in outcomes if s.group == group], known)
    _print_forks([(s, o) for s, o in outcomes if s.group not in ("release", "commit", "named")], known)
    return _print_totals([(s, o) for s, o in outcomes if s.group != "release"], known)


def _row(*cells) -> None:
    print("| " + " | ".join(map(str, cells)) + " |")


RESULT = ("lines", "exact files", "by the syntax tree", "beside a known statement", "revert")
"""Columns of :func:`_result`."""


def _result(outcome: Outcome, known: Neighbours) -> tuple:
    if outcome.state != "placed":
        return (f"{outcome.state}: {outcome.how}", *[""] * (len(RESULT) - 1))
    return (len(HOOKS), outcome.exact, len(FILES) - outcome.exact, beside_known(outcome, known), "same bytes")


def _print_trees(title: str, outcomes, known: Neighbours) -> None:
    if outcomes:
        _row(title, "date", "megatron-core", *RESULT)
        _row(*["---"] * (3 + len(RESULT)))
        for source, outcome in sorted(outcomes, key=lambda pair: pair[1].date):
            _row(source.label, outcome.date, outcome.version, *_result(outcome, known))
        print()


def _print_forks(outcomes, known: Neighbours) -> None:
    if not outcomes:
        return
    _row("fork", "its main branch", "date", "megatron-core", *RESULT, "other heads: placed", "refused", "older")
    _row(*["---"] * (7 + len(RESULT)))
    groups: dict[str, list] = {}
    for source, outcome in outcomes:
        groups.setdefault(source.group, []).append((source, outcome))
    for group, pairs in sorted(groups.items()):
        counts = Counter(o.state for s, o in pairs if s.label != "HEAD")
        about = ("has no Megatron", *[""] * (2 + len(RESULT)))
        for source, outcome in pairs:
            if source.label == "HEAD":
                about = (source.commit[:10], outcome.date, outcome.version, *_result(outcome, known))
        _row(group, *about, counts["placed"], counts["refused"], counts["old"])
    print()


def _print_totals(outcomes, known: Neighbours) -> int:
    """Print the summary over all trees except releases, and every refusal and failure."""
    counts = Counter(outcome.state for _, outcome in outcomes)
    holding = counts["placed"] + counts["refused"] + counts["FAILED"]
    print(
        f"{counts['placed']} of {holding} trees that hold the hooks' places are placed; "
        f"{counts['old']} are older than the places."
    )
    unknown = [(s, o) for s, o in outcomes if o.state == "placed" and beside_known(o, known) < len(HOOKS)]
    for source, outcome in outcomes:
        if outcome.state in ("refused", "FAILED"):
            print(f"- {outcome.state}: {source.group} {source.label} ({source.commit[:10]}): {outcome.how}")
    for source, outcome in unknown:
        names = [n for n, found in outcome.neighbours.items() if not found & known.get(n, set())]
        print(f"- beside no known statement: {source.group} {source.label} ({source.commit[:10]}): {', '.join(names)}")
    return 1 if counts["FAILED"] or unknown else 0
