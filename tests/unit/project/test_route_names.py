"""Planning asks what a route is and not what it is called (``workload/route.py``)."""

import ast

import pytest
from places import ROOT
from test_rooms import PRODUCT

from megatron_ext.workload.route import ROUTES

ROOMS = ("planner", "bounds", "simulator")
DATA = {
    "what_limits.py": "words for links that are busy",
    "costs.py": "links whose costs may be wrong",
    "slowdowns.py": "links that a table's contention names",
    "explain.py": "words for places where optimizer states rest",
    "host_notes.py": "places where optimizer states rest",
}
"""Files in which such a word is a link or a place, and why; ``states_rest`` is one everywhere."""


def names_of_routes(text: str) -> list[tuple[int, str]]:
    """Lines that name a route, and the name."""
    tree, places = ast.parse(text), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare) and isinstance(node.left, ast.Attribute) and node.left.attr == "states_rest":
            places |= {*node.comparators}
        elif isinstance(node, ast.keyword) and node.arg == "states_rest":
            places.add(node.value)
    words = [node for node in ast.walk(tree) if isinstance(node, ast.Constant) and node not in places]
    return [(node.lineno, node.value) for node in words if node.value in ROUTES]


@pytest.mark.parametrize("room", ROOMS)
def test_no_file_names_a_route(room):
    files = [path for path in (ROOT / "megatron_ext" / room).rglob("*.py") if path.name not in DATA]
    assert {str(path): found for path in files if (found := names_of_routes(path.read_text()))} == {}


def test_a_branch_by_name_is_found_and_a_place_is_not():
    assert names_of_routes('if route == "cpu_shard":\n    pass') == [(1, "cpu_shard")]
    assert names_of_routes('routed = ["gpu"]') == [(1, "gpu")]
    assert names_of_routes('replace(group, states_rest="nvme") if group.states_rest != "nvme" else group') == []


def speaks_of(path, route: str) -> bool:
    """Whether a file names the route, its part of a table or a field of that name."""
    said = [getattr(node, "value", getattr(node, "id", "")) for node in ast.walk(ast.parse(path.read_text()))]
    return any(isinstance(one, str) and one.rpartition(".")[2] == route for one in said)


def test_a_route_that_is_measured_is_added_in_at_most_ten_files():
    """Of the youngest one, which has a curve, an operation that measures it and a check of ``doctor``."""
    named = {path.name for path in PRODUCT if speaks_of(path, "cpu_shard")}
    assert {"route.py", "make_routes.py", "cost_table.py", "operations.py"} < named
    assert len(named | {"shard_gather.py"}) <= 10, named
