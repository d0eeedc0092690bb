"""Check in the syntax tree, file by file, that every hook is in its place.

A hook line that a merge or a person has moved still runs, often without an error,
and gathers at the wrong time. So presence is not enough. Each line must stand in the one
gap that ``find_places.py`` describes, and it must add a statement to the syntax tree and change nothing else there.
"""

import ast
import re
from collections import Counter
from pathlib import Path

from megatron_ext.checkout.find_places import find_gaps
from megatron_ext.checkout.gaps import HookGap
from megatron_ext.checkout.hook_table import FILES, LINES, hooks_of
from megatron_ext.checkout.syntax import PlaceError


def is_hook_line(line: str) -> bool:
    """Whether the whole text of a physical line is that of a line that ``apply`` writes."""
    return line.strip() in LINES


def hook_numbers(text: str) -> list[int]:
    """Numbers (from 1) of the lines in ``text`` that are hook lines."""
    # Not splitlines: it also splits at form feeds and similar characters, which do not end a line in Python.
    return [number for number, line in enumerate(text.split("\n"), start=1) if is_hook_line(line)]


EDITED = "a hook line was edited by hand or by a formatter"

_CALLED = "|".join(re.findall(r"(?:hooks|gather_schedule)\.(\w+)\(", " ".join(LINES)))
_LEFT_OVER = re.compile(rf"[^#]*\b(hooks|gather_schedule)\.({_CALLED})\(")
"""A call of a hook, also on a line of its own, as formatters write it."""


def edited_line(file: str, text: str) -> int | None:
    """Number of the first line that calls a hook but is not as ``apply`` writes it; None if ``file`` lacks no hook or
    has no such line."""
    if len(hook_numbers(text)) >= len(hooks_of(file)):
        return None
    rows = enumerate(text.split("\n"), start=1)
    return next((number for number, row in rows if _LEFT_OVER.match(row) and not is_hook_line(row)), None)


def hook_lines(file: str, text: str) -> dict[int, HookGap]:
    """Maps the number of every hook line that stands in its place to its gap.

    Raises:
        PlaceError: ``file`` lacks the place of a hook, or a hook line is not a statement of its own.
    """
    rows, ours = text.split("\n"), hook_numbers(text)
    # Replaced by blank lines, so that line numbers stay those of the file.
    without = "\n".join("" if number in ours else row for number, row in enumerate(rows, start=1))
    left = {gap.hook.name: gap for gap in find_gaps(file, without)}
    found = {}
    for number in ours:
        row = rows[number - 1].rstrip()
        for gap in left.values():
            if gap.line == row and gap.first < number <= gap.last:
                found[number] = left.pop(gap.hook.name)
                break
    _check_statements(file, text, without, ours)
    return found


def _check_statements(file: str, text: str, without: str, ours: list[int]) -> None:
    """Check that both texts have the same syntax tree, except for whole statements on the lines ``ours``."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError) as error:
        raise PlaceError(f"{file} does not parse with its hooks: {error}") from None
    for node in ast.walk(tree):
        for name in ("body", "orelse", "finalbody"):
            body = getattr(node, name, None)
            if isinstance(body, list):
                setattr(node, name, [statement for statement in body if statement.lineno not in ours])
    if ast.dump(tree) != ast.dump(ast.parse(without)):
        raise PlaceError(f"a hook line of {file} is not a statement of its own")


def strip_hooks(file: str, text: str) -> str:
    """``text`` without the lines that ``apply`` wrote, byte for byte as it was before.

    Raises:
        PlaceError: there are more lines with one text than ``apply`` writes.
    """
    rows, going = text.split("\n"), hook_numbers(text)
    numbers: dict[str, list[int]] = {}
    for number in going:
        numbers.setdefault(LINES[rows[number - 1].strip()], []).append(number)
    written = Counter(hook.text for hook in hooks_of(file))
    for hook_text, lines in numbers.items():
        if len(lines) > written[hook_text]:
            said = f"lines {', '.join(map(str, lines))} are the same hook line"
            how = f"which belongs in {written[hook_text]} places; delete those that you have added"
            raise PlaceError(f"{said}, {how}")
    return "\n".join(row for number, row in enumerate(rows, start=1) if number not in going)


def verify_text(file: str, text: str) -> list[str]:
    """Problems of one patched file, each with the name of its hook if it has one. Empty if every hook of the file is in
    its place."""
    edited = edited_line(file, text)
    if edited:
        return [f"line {edited}: {EDITED}"]
    try:
        in_place = hook_lines(file, text)
    except PlaceError as error:
        return [str(error).removeprefix(f"{file} ")]
    lost = [number for number in hook_numbers(text) if number not in in_place]
    problems = [f"line {number} is not where its hook belongs" for number in lost]
    there = {gap.hook.name for gap in in_place.values()}
    return problems + [f"{hook.name}: not in its place" for hook in hooks_of(file) if hook.name not in there]


def verify_hooks(path) -> list[str]:
    """Problems of all hooks of the tree at ``path``, each with its file. If there are none, training may start.

    A file that the tree does not have is not a problem: a core-only tree has no training scripts.
    Takes about 0.1 s: six files are parsed, nothing is imported.
    """
    problems = []
    for file in FILES:
        place = Path(path) / file
        if not place.is_file():
            continue
        try:
            text = place.read_bytes().decode()
        except (OSError, UnicodeDecodeError) as error:
            problems.append(f"{file}: cannot be read: {error}")
            continue
        problems += [f"{file}: {problem}" for problem in verify_text(file, text)]
    return problems
