"""All host memory that the device can reach stands in a table: who writes it, who reads it, and what orders them."""

import ast
import re

import pytest
from places import ROOT

PAGE = (ROOT / "docs/architecture.md").read_text()
ROWS = re.findall(r"^\| .*$", PAGE.partition("## Host memory that the device reaches")[2].partition("\n## ")[0], re.M)
ROOMS = ("runtime", "megatron")
LOCKS = {"host_tensor", "pin", "page_locked", "pin_memory", "cudaHostRegister"}
MADE_OF = {"device.py", "page_locked.py"}
"""Where memory is locked for all others."""

STANDS_IN = {"copies.py"}
"""In which no memory is locked: it asks host_pool.py."""


def locking(text: str) -> bool:
    """Whether a file locks memory."""
    if not any(name in text for name in LOCKS):  # syntax trees of all files would be made by every worker
        return False
    calls = (node.func for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call))
    return any(isinstance(function, ast.Attribute) and function.attr in LOCKS for function in calls)


FILES = sorted(
    path.name
    for room in ROOMS
    for path in (ROOT / "megatron_ext" / room).rglob("*.py")
    if path.name not in MADE_OF | STANDS_IN and locking(path.read_text())
)


@pytest.mark.parametrize("name", FILES)
def test_page_locked_memory_stands_in_the_table(name):
    assert any(f"`{name}`" in row or f"/{name}`" in row for row in ROWS)


def test_the_table_says_who_writes_reads_and_orders():
    rows = [[cell.strip() for cell in row.strip("|").split("|")] for row in ROWS[1:]]
    assert len(rows) >= len(FILES) and all(len(row) == 4 and all(row) for row in rows)


def test_memory_that_is_locked_elsewhere_is_seen():
    assert locking("def f(device):\n    return device.host_tensor(3, None)")
    assert not locking("def f(device):\n    return device.stream('name')")
