"""The rooms of docs/architecture.md: imports run downwards, files hold one thing, functions are short."""

import ast
import functools
import io
import re
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
MAX_FILE_LINES, MAX_FUNCTION_LINES = 400, 60
MAX_LINES = 29_621
"""Of code in the product, launcher and boards included. A feature that needs more raises it, with what it adds in the
same change."""

BENCH_FILES = {"cpu_compat.py", "megatron_on_cpu.py", "host_device.py", "run_on_cpu.py"}
"""Files of the CPU test bench outside of its room, which is below what they are made of: Megatron, streams, verbs."""

SHARED_NAMES = {"__init__.py", "__main__.py"}

FILES = sorted(PACKAGE.rglob("*.py"))
BESIDE = [path for folder in ("tests", "benchmarks", "scripts", "examples") for path in (ROOT / folder).rglob("*.py")]

OF_THE_BENCH = re.compile("gloo|softirq|emulated|shared by ranks", re.I)
"""Words for what a GPU user has not: the CPU test bench, which has rooms and files of its own, and the laboratory."""

NAMES_OF_OTHERS = {
    "backends.py": "torch's name of a backend",
    "gpt_arguments.py": "Megatron's option",
    "hardware_sheet.py": "a source",
    "ignored_options.py": "Megatron's option",
    "launcher.py": "torch's environment variable",
}
"""Files that have such a word, and why."""


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0]


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


MODULES = {module_of(path): path for path in FILES}


@functools.cache
def nodes_of(path: Path) -> list[ast.AST]:
    return list(ast.walk(ast.parse(path.read_text())))


def imports_of(path: Path):
    """Modules that a file imports, wherever in it; ``from package import module`` counts as the module."""
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if inner in MODULES else node.module


def wrong_imports(path: Path):
    """What a file imports that is not of a room below its own, or not for its room."""
    own = room_of(path)
    for name in imports_of(path):
        parts = name.split(".")
        room = parts[1] if parts[0] == "megatron_ext" and len(parts) > 1 else own
        above = room != own and FLOORS.get(room, 0) >= FLOORS[own]
        without = ("torch",) * (own in WITHOUT_TORCH) + ("megatron",) * (own != "megatron")
        if above or parts[0] in without:
            yield f"{path}: {own} (floor {FLOORS[own]}) imports {name}"


def test_a_file_imports_rooms_below_its_own_only():
    assert [wrong for path in FILES if room_of(path) in FLOORS for wrong in wrong_imports(path)] == []


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


def test_no_two_classes_share_a_name():
    """Whoever looks for a class finds one, and its name says what it holds."""
    names = Counter(node.name for path in FILES for node in nodes_of(path) if isinstance(node, ast.ClassDef))
    assert [name for name, count in names.items() if count > 1] == []


def test_files_are_short():
    lengths = {path: len(path.read_text().splitlines()) for path in (*FILES, *BESIDE)}
    assert {str(path): length for path, length in lengths.items() if length > MAX_FILE_LINES} == {}


def test_functions_are_short():
    assert [
        f"{path}:{node.lineno}: {node.name} has {length} lines"
        for path in (*FILES, *BESIDE)
        for node in nodes_of(path)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if (length := (node.end_lineno or 0) - node.lineno + 1) > MAX_FUNCTION_LINES
    ] == []


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
    for node in nodes_of(path):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


PRODUCT = [path for path in FILES if path.name not in BENCH_FILES and PACKAGE / "cpubench" not in path.parents]


def test_the_product_stays_small():
    """Lines of code as :func:`code_lines` counts them, without the CPU test bench."""
    assert sum(map(code_lines, PRODUCT)) <= MAX_LINES


def test_rooms_of_a_gpu_user_do_not_speak_of_the_bench():
    found = {path.name: words for path in PRODUCT if (words := OF_THE_BENCH.findall(path.read_text()))}
    assert found.keys() == NAMES_OF_OTHERS.keys(), found


@pytest.mark.parametrize("room", ["planner", "bounds", "simulator"])
def test_every_loop_that_might_not_end_says_why_it_does(room):
    for path in sorted((PACKAGE / room).rglob("*.py")):
        lines = path.read_text().splitlines()
        for node in nodes_of(path):
            if isinstance(node, ast.While):
                near = lines[max(node.lineno - 3, 0) : node.body[0].lineno]
                assert any("# ends: " in line for line in near), f"{path.name}:{node.lineno}"
