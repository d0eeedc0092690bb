"""A gap between two statements of one body, where a hook line may stand, and checks of the code around it."""

import ast
from collections.abc import Collection
from dataclasses import dataclass

from megatron_ext.checkout.hook_table import Hook
from megatron_ext.checkout.syntax import FunctionNode, PlaceError, bodies, end_line, own_nodes, parameters, span


@dataclass(frozen=True)
class HookGap:
    """Where one hook line may stand, in line numbers of the text without hook lines.

    Attributes:
        hook: the hook.
        line: the line to insert, indented, without a line end.
        first: number of the first line that it may follow (the statement before ends there).
        last: number of the last line that it may follow (the statement after begins on the next line).
        chosen: number of the line after which our patches insert it.
    """

    hook: Hook
    line: str
    first: int
    last: int
    chosen: int


def _first_line(statement: ast.stmt) -> int:
    decorators = getattr(statement, "decorator_list", [])
    return min([statement.lineno, *(d.lineno for d in decorators)])


def gap_before(hook: Hook, body: list[ast.stmt], index: int, lines: list[str], **names) -> HookGap:
    """The gap before ``body[index]``. Our patches insert the line above the statement's comment, if it has one."""
    statement = body[index]
    last = _first_line(statement) - 1
    chosen = last
    while chosen > 0 and lines[chosen - 1].strip().startswith("#"):
        chosen -= 1
    first = end_line(body[index - 1]) if index else last
    while not index and first > 0 and (not lines[first - 1].strip() or lines[first - 1].strip().startswith("#")):
        first -= 1
    return _gap(hook, statement, (first, last, max(first, chosen)), lines, **names)


def gap_after(hook: Hook, body: list[ast.stmt], index: int, lines: list[str], **names) -> HookGap:
    """The gap after ``body[index]``. Our patches insert the line directly below the statement."""
    statement = body[index]
    first = last = end_line(statement)
    # The gap extends over blank lines and comments up to the next line of code.
    while last < len(lines) and (not lines[last].strip() or lines[last].strip().startswith("#")):
        last += 1
    return _gap(hook, statement, (first, last, first), lines, **names)


def _gap(hook: Hook, neighbour: ast.stmt, bounds: tuple[int, int, int], lines: list[str], **names) -> HookGap:
    text = lines[_first_line(neighbour) - 1]
    indentation = text[: len(text) - len(text.lstrip())]
    if len(indentation) != neighbour.col_offset:
        raise PlaceError(f"line {neighbour.lineno} holds several statements")
    return HookGap(hook, indentation + hook.line(**names), *bounds)


def reached(function: FunctionNode, gap: HookGap) -> HookGap:
    """Check that control reaches ``gap`` whenever the function ends without an exception, and return ``gap``."""
    for node in own_nodes(function):
        if isinstance(node, ast.Return) and node.lineno <= gap.first:
            raise PlaceError(f"{function.name} may return at line {node.lineno}, before the hook is reached")
    for body in bodies(function):
        for index, statement in enumerate(body):
            leaves = isinstance(statement, (ast.Raise, ast.Continue, ast.Break)) and index + 1 < len(body)
            if leaves and statement.lineno <= gap.first < end_line(body[-1]):
                raise PlaceError(f"the hook is never reached, because of line {statement.lineno}")
    return gap


def check_above(gap: HookGap, lines: list[int], what: str) -> None:
    """Check that the hook comes before all of ``lines``."""
    if lines and min(lines) <= gap.last:
        raise PlaceError(f"{what} at line {min(lines)}, before the hook")


def check_below(gap: HookGap, lines: list[int], what: str) -> None:
    """Check that the hook comes after all of ``lines``."""
    if lines and max(lines) > gap.first:
        raise PlaceError(f"{what} at line {max(lines)}, after the hook")


Above = tuple[list[int], str]
"""Line numbers, and what happens on these lines."""


def proven(
    function: FunctionNode, gap: HookGap, needed: set[str], rebound: Collection[str] = (), *, above: Above = ([], "")
) -> HookGap:
    """Check ``gap`` and return it: control reaches it, it comes before all lines ``above``, and the names in the hook
    line have the meaning that the hook expects.

    ``needed`` must be bound in ``function`` above the hook. ``rebound`` are names that the hook line itself binds: if
    one were used above the hook, that use would change from a global to an unbound local. ``hooks`` and
    ``gather_schedule`` must not be used at all.
    """
    check_above(reached(function, gap), *above)
    names = [node for node in ast.walk(function) if isinstance(node, ast.Name)]
    stored = {node.id for node in names if isinstance(node.ctx, ast.Store) and node.lineno <= gap.chosen}
    for name in sorted(needed - stored - parameters(function)):
        raise PlaceError(f"no variable {name} in {span(function)}")
    for node in ast.walk(function):
        if not isinstance(node, (ast.Name, ast.arg)):
            continue
        name = node.id if isinstance(node, ast.Name) else node.arg
        if isinstance(node, ast.Name) and name in rebound and node.lineno <= gap.chosen:
            raise PlaceError(f"{name} is used at line {node.lineno} of {function.name}, before the hook")
        if name in ("hooks", "gather_schedule"):
            raise PlaceError(f"{function.name} has a variable {name} of its own, line {node.lineno}")
    return gap
