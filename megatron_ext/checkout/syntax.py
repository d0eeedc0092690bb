"""Find functions and statements in the syntax tree of a file, and require that there is exactly one."""

import ast
from collections.abc import Callable, Iterator

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


class PlaceError(Exception):
    """The tree does not have the form a hook needs; the text says what is missing."""


def only(found: list, what: str, where: str, lines: list[int]):
    """The one element of ``found``.

    Args:
        found: what was looked for.
        what: its name.
        where: where it was looked for, e.g. ``function train (lines 10 to 90)``.
        lines: the line of each element.

    Raises:
        PlaceError: there is none, or more than one. The text gives their lines.
    """
    if not found:
        raise PlaceError(f"no {what} in {where}")
    if len(found) > 1:
        raise PlaceError(f"{len(found)} times {what} in {where}, lines {', '.join(map(str, lines))}; expected 1")
    return found[0]


def span(node: FunctionNode | ast.ClassDef) -> str:
    """A function or class with its lines, for messages."""
    return f"{node.name} (lines {node.lineno} to {node.end_lineno})"


def function_named(body: list[ast.stmt], *names: str, where: str = "the module") -> FunctionNode:
    """The one function in ``body`` that has the first of ``names`` that exists there."""
    for name in names:
        found = [n for n in body if isinstance(n, FunctionNode) and n.name == name]
        if found:
            return only(found, f"def {name}", where, [n.lineno for n in found])
    raise PlaceError(f"no function {' or '.join(names)} in {where}")


def method_named(tree: ast.Module, class_name: str, name: str) -> FunctionNode:
    """The method ``name`` of the class ``class_name``."""
    found = [n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == class_name]
    owner = only(found, f"class {class_name}", "the module", [n.lineno for n in found])
    return function_named(owner.body, name, where=span(owner))


def bodies(node: ast.AST) -> Iterator[list[ast.stmt]]:
    """All statement lists below ``node``, without entering nested functions and classes."""
    for name in ("body", "orelse", "finalbody"):
        body = getattr(node, name, None)
        if isinstance(body, list) and body and isinstance(body[0], ast.stmt):
            yield body
            for statement in body:
                if not isinstance(statement, (*FunctionNode.__args__, ast.ClassDef)):
                    yield from bodies(statement)
    for handler in getattr(node, "handlers", []):
        yield from bodies(handler)


def own_nodes(function: FunctionNode) -> Iterator[ast.AST]:
    """All nodes of a function's body, without entering nested functions, classes and lambdas."""
    pending: list[ast.AST] = list(reversed(function.body))
    while pending:
        node = pending.pop()
        yield node
        if not isinstance(node, (*FunctionNode.__args__, ast.ClassDef, ast.Lambda)):
            pending += reversed(list(ast.iter_child_nodes(node)))


def calls(function: FunctionNode, *names: str) -> list[int]:
    """Lines in ``function`` itself that call a function or method with one of ``names``."""
    called = [n for n in own_nodes(function) if isinstance(n, ast.Call)]
    return [n.lineno for n in called if getattr(n.func, "id", getattr(n.func, "attr", None)) in names]


def statement_where(function: FunctionNode, test: Callable[[ast.stmt], bool], what: str) -> tuple[list[ast.stmt], int]:
    """The one statement of ``function`` for which ``test`` holds, as (body, index)."""
    found = [(b, i) for b in bodies(function) for i, s in enumerate(b) if test(s)]
    return only(found, what, span(function), [b[i].lineno for b, i in found])


def tests_attribute(statement: ast.stmt, owner: str, *attributes: str) -> bool:
    """Whether ``statement`` is an ``if`` whose test reads all of ``attributes`` of the name ``owner``."""
    if not isinstance(statement, ast.If):
        return False
    read = (node for node in ast.walk(statement.test) if isinstance(node, ast.Attribute))
    return {n.attr for n in read if isinstance(n.value, ast.Name) and n.value.id == owner} >= set(attributes)


def end_line(statement: ast.stmt) -> int:
    """Number of the statement's last line."""
    assert statement.end_lineno is not None  # the parser always sets it
    return statement.end_lineno


def assigned_name(statement: ast.stmt) -> str | None:
    """The name, if the statement assigns to exactly one plain name."""
    if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
        target = statement.targets[0]
        return target.id if isinstance(target, ast.Name) else None
    return None


def assigned_value(statement: ast.stmt, name: str) -> ast.expr | None:
    """The value that the statement assigns to the plain name ``name``; None if it does not assign to that alone."""
    return statement.value if isinstance(statement, ast.Assign) and assigned_name(statement) == name else None


def parameters(function: FunctionNode) -> set[str]:
    """Names of all parameters of a function."""
    a = function.args
    return {p.arg for p in (*a.posonlyargs, *a.args, *a.kwonlyargs, a.vararg, a.kwarg) if p}
