"""The rooms of docs/architecture.md: imports run downwards, files hold one thing, functions are short."""

import ast
import io
import tokenize
from collections import Counter
from pathlib import Path

import pytest
from places import ROOT

PACKAGE = ROOT / "megatron_ext"
FLOORS = {
    "cli": 8,
    "report": 7,
    "doctor": 7,
    "planner": 6,
    "measure": 5,
    "megatron": 5,
    "bounds": 5,
    "runtime": 4,
    "simulator": 4,
    "cost": 3,
    "schedule": 3,
    "launch": 3,
    "workload": 2,
    "checkout": 2,
    "cpubench": 2,
    "formats": 1,
}
WITHOUT_TORCH = {"workload", "formats", "cost", "schedule", "simulator", "bounds", "planner"}
MAX_FUNCTION_LINES = 60
MAX_LINES = 31_281
"""Of code in the product, launcher and boards included. A feature that needs more raises it, with what it adds in the
same change."""

SHARED_NAMES = {"__init__.py", "__main__.py"}

FILES = sorted(PACKAGE.rglob("*.py"))


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0]


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


MODULES = {module_of(path): path for path in FILES}


def imports_of(path: Path):
    """Modules that a file imports, wherever in it; ``from package import module`` counts as the module."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if inner in MODULES else node.module


def id_of(path: Path) -> str:
    return str(path.relative_to(PACKAGE))


@pytest.mark.parametrize("path", [path for path in FILES if room_of(path) in FLOORS], ids=id_of)
def test_a_file_imports_rooms_below_its_own_only(path):
    own = room_of(path)
    for name in imports_of(path):
        parts = name.split(".")
        if parts[0] == "megatron_ext" and len(parts) > 1 and parts[1] != own and parts[1] in FLOORS:
            assert FLOORS[parts[1]] < FLOORS[own], f"{own} (floor {FLOORS[own]}) imports {name}"
        if own in WITHOUT_TORCH:
            assert parts[0] not in ("torch", "megatron"), name
        if own not in ("megatron", "cpubench"):
            assert parts[0] != "megatron", name


def test_no_file_reaches_itself_by_imports():
    graph = {
        name: {i for i in imports_of(path) if i in MODULES and i != name}
        for name, path in MODULES.items()
        if path.name != "__init__.py"
    }
    done: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, " -> ".join((*trail[trail.index(name) :], name))
        if name not in done:
            for inner in sorted(graph.get(name, ())):
                visit(inner, (*trail, name))
            done.add(name)

    for name in sorted(graph):
        visit(name, ())


def test_every_directory_of_the_package_is_a_known_room():
    assert {room_of(path) for path in FILES if path.parent != PACKAGE} == set(FLOORS)


def test_no_two_files_share_a_name():
    names = Counter(path.name for path in FILES if path.name not in SHARED_NAMES)
    assert [name for name, count in names.items() if count > 1] == []


@pytest.mark.parametrize("path", FILES, ids=id_of)
def test_functions_are_short(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = node.end_lineno - node.lineno + 1
            assert length <= MAX_FUNCTION_LINES, f"{node.name} has {length} lines"


def code_lines(path: Path) -> int:
    """Lines of a file that hold code: no blank line, comment or docstring."""
    text = path.read_text()
    nothing = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    lines = {
        number
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type not in nothing
        for number in range(token.start[0], token.end[0] + 1)
    }
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


def test_the_product_stays_small():
    """Lines of code as :func:`code_lines` counts them, without the CPU test bench."""
    product = [path for path in FILES if PACKAGE / "cpubench" not in path.parents]
    assert sum(map(code_lines, product)) <= MAX_LINES


@pytest.mark.parametrize("room", ["planner", "bounds", "simulator"])
def test_every_loop_that_might_not_end_says_why_it_does(room):
    for path in sorted((PACKAGE / room).rglob("*.py")):
        text = path.read_text()
        lines = text.splitlines()
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.While):
                near = lines[max(node.lineno - 3, 0) : node.body[0].lineno]
                assert any("# ends: " in line for line in near), f"{path.name}:{node.lineno}"
