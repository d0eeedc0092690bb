"""Looking around in the syntax tree of a file: the one function, the one statement."""

import ast
from collections.abc import Callable, Iterator

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


class PlaceError(Exception):
    """The tree does not have the form a hook needs; the text says what is missing."""


def only(found: list, what: str):
    """The one element of ``found``; PlaceError, naming ``what``, unless there is exactly one."""
    if len(found) != 1:
        raise PlaceError(f"{what}: found {len(found)}, expected 1")
    return found[0]


def function_named(body: list[ast.stmt], *names: str) -> FunctionNode:
    """The one function in ``body`` that has the first of ``names`` that exists there."""
    for name in names:
        found = [n for n in body if isinstance(n, FunctionNode) and n.name == name]
        if found:
            return only(found, f"function {name}")
    raise PlaceError(f"no function {' or '.join(names)}")


def method_named(tree: ast.Module, class_name: str, name: str) -> FunctionNode:
    """The method ``name`` of the class ``class_name``."""
    found = [n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == class_name]
    return function_named(only(found, f"class {class_name}").body, name)


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


def statement_where(
    node: ast.AST, test: Callable[[ast.stmt], bool], what: str
) -> tuple[list[ast.stmt], int]:
    """The one statement below ``node`` for which ``test`` holds, as (body, index)."""
    found = [(b, i) for b in bodies(node) for i, s in enumerate(b) if test(s)]
    return only(found, what)


def tests_attribute(statement: ast.stmt, owner: str, *attributes: str) -> bool:
    """An ``if`` whose test reads every one of ``attributes`` of the name ``owner``."""
    if not isinstance(statement, ast.If):
        return False
    read = {
        n.attr
        for n in ast.walk(statement.test)
        if isinstance(n, ast.Attribute) and isinstance(n.value, ast.Name) and n.value.id == owner
    }
    return read >= set(attributes)


def is_not_none(statement: ast.stmt, owner: str, attribute: str) -> bool:
    """``if owner.attribute is not None:`` and nothing else in the test."""
    if not isinstance(statement, ast.If) or not isinstance(statement.test, ast.Compare):
        return False
    compare = statement.test
    return tests_attribute(statement, owner, attribute) and isinstance(compare.ops[0], ast.IsNot)


def assigned_name(statement: ast.stmt) -> str | None:
    """The name, if the statement assigns to exactly one plain name."""
    if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
        target = statement.targets[0]
        return target.id if isinstance(target, ast.Name) else None
    return None


def parameters(function: FunctionNode) -> set[str]:
    """Names of all parameters of a function."""
    a = function.args
    return {p.arg for p in (*a.posonlyargs, *a.args, *a.kwonlyargs, a.vararg, a.kwarg) if p}
