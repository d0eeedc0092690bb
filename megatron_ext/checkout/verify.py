"""Is every hook in its place? Judged in the syntax tree, file by file.

A hook line that a merge, or a person, has put elsewhere still runs, often without an error,
and gathers at the wrong time. So presence is not enough: each line must stand in the one
gap that ``places.py`` describes.
"""

from dataclasses import dataclass
from pathlib import Path

from megatron_ext.checkout.hook_table import FILES, MARKER
from megatron_ext.checkout.places import find_gaps
from megatron_ext.checkout.syntax import PlaceError


@dataclass(frozen=True)
class Problem:
    """One hook that is not as it should be.

    Attributes:
        file: path below the root of the tree.
        hook: name of the hook, or "" where a line belongs to none.
        message: what is wrong.
    """

    file: str
    hook: str
    message: str

    def __str__(self) -> str:
        return f"{self.file}: {self.hook + ': ' if self.hook else ''}{self.message}"


def is_hook_line(line: str) -> bool:
    """Whether a physical line is one of ours, of this version or of another."""
    body = line.rstrip()
    return body.endswith(MARKER) and ("megatron_ext" in body or "gather_schedule" in body)


def strip_hooks(text: str) -> str:
    """``text`` without our lines: byte for byte what it was before they were inserted."""
    # Not splitlines: it also cuts at form feeds and the like, which do not end a line of Python.
    return "\n".join(line for line in text.split("\n") if not is_hook_line(line))


def count_hooks(text: str) -> int:
    """Number of our lines in ``text``."""
    return sum(map(is_hook_line, text.split("\n")))


def verify_text(file: str, text: str) -> list[Problem]:
    """Problems of one patched file; empty means that every hook of it is in its place."""
    try:
        gaps = find_gaps(file, strip_hooks(text))
    except PlaceError as error:
        return [Problem(file, "", str(error).removeprefix(f"{file} "))]
    problems = []
    missing = {gap.hook.name: gap for gap in gaps}
    pristine_lines = 0
    for number, line in enumerate(text.split("\n"), start=1):
        if not is_hook_line(line):
            pristine_lines += 1
            continue
        at_home = [
            gap
            for gap in missing.values()
            if gap.line == line and gap.first <= pristine_lines <= gap.last
        ]
        if at_home:
            del missing[at_home[0].hook.name]
        elif any(gap.line.strip() == line.strip() for gap in gaps):
            problems.append(Problem(file, "", f"line {number} is not where its hook belongs"))
        else:
            problems.append(
                Problem(file, "", f"line {number} is a hook line of another megatron-ext version")
            )
    problems += [Problem(file, name, "not in its place") for name in missing]
    return problems


def verify_hooks(path) -> list[Problem]:
    """Problems of all hooks of the tree at ``path``; empty means that training may start.

    Files the tree does not have (a core-only tree has no training scripts) are no problem.
    Takes about a tenth of a second: six files are parsed, nothing is imported.
    """
    problems = []
    for file in FILES:
        place = Path(path) / file
        if not place.is_file():
            continue
        try:
            text = place.read_bytes().decode()
        except (OSError, UnicodeDecodeError) as error:
            problems.append(Problem(file, "", f"cannot be read: {error}"))
            continue
        problems += verify_text(file, text)
    return problems
