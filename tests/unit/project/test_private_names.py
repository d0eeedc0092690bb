"""What the product and its laboratory call of torch by a private name, a release may lack: there is another way then.

``torch._C._cuda_getDriverVersion`` was called by its name and is not there from 2.11 on.
"""

import ast
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from places import ROOT
from trees import tree_of

FOLDERS = ("megatron_ext", "examples", "scripts", "benchmarks")
FILES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))

KINDS = (
    *(torch, torch.Tensor, torch.nn.Module, torch.UntypedStorage, torch.cuda, torch.autograd),
    *(torch.autograd.graph.Node, dist, dist.distributed_c10d, dist.ProcessGroup, dist.Work, torch.optim.Optimizer),
)
"""Whose private names are torch's, whatever they are read from."""

OWN = {"_asdict", "_replace", "_fields", "_make", "_exit"}
"""Private names of Python's that are none."""

WITHOUT = {
    "_foreach_add_": "named so in every release since 1.9; torch's own optimizers count steps by it",
    "_cdata": "by which torch itself tells storages apart; one of a tensor without data has no address",
    ("runtime/routes/symmetric_gather.py", "torch.distributed._symmetric_memory"): "missing() looks for it first",
    ("megatron/describe_model.py", "torch.distributed._meta_registrations"): "asked for alone",
    ("megatron/describe_model.py", "torch._C._distributed_c10d"): "only in releases that lack the one before: old ones",
    ("megatron/boundaries.py", "_backward_hooks"): "only where nodes have the method that goes with it",
    ("torch_calls.py", "_backward_hooks"): "times what the product does",
    ("torch_calls.py", "_register_hook_dict"): "times what the product does",
}
"""By name, or by end of the path and name, why a call has no other way."""

CATCH = {"ImportError", "AttributeError", "ModuleNotFoundError", "Exception"}


def private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name not in OWN


def of_torch(tree: ast.Module) -> set[str]:
    """Names by which a file calls torch and what is in it."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {a.asname or "torch" for a in node.names if a.name.split(".")[0] == "torch"}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            found |= {a.asname or a.name for a in node.names}
    return found


def root_of(node: ast.expr) -> str | None:
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None


def private_names(tree: ast.Module) -> Iterator[tuple[ast.AST, str]]:
    """Private names of torch that a file reads, and where."""
    torches = of_torch(tree)
    asked = {node.args[0] for node in ast.walk(tree) if is_question(node)}
    followed = {node.value for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            if any(map(private, node.module.split("."))):
                yield node, node.module
            yield from ((node, a.name) for a in node.names if private(a.name))
        elif isinstance(node, ast.Import):
            yield from ((node, a.name) for a in node.names if a.name.startswith("torch.") and "._" in a.name)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            if node.value.startswith("torch.") and "._" in node.value and " " not in node.value:
                yield node, node.value
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            within, root = node.value, root_of(node)
            of_bindings = isinstance(within, ast.Attribute) and within.attr == "_C" and root in torches
            bindings = node.attr == "_C" and (node in followed or node in asked)  # what is behind it counts
            named = private(node.attr) and not bindings and root not in ("self", "cls")
            if of_bindings or (named and (root in torches or any(hasattr(kind, node.attr) for kind in KINDS))):
                yield node, node.attr


def is_question(node: ast.AST) -> bool:
    """Whether it is ``hasattr(object, name)`` or ``getattr(object, name, default)``."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
        return False
    return (node.func.id, len(node.args)) in (("hasattr", 2), ("getattr", 3))


def guarded(tree: ast.Module) -> tuple[set[str], set[ast.AST]]:
    """Names that a file looks for before it takes them, and what stands where their lack is caught."""
    looked_for, caught = set(), set()
    for node in ast.walk(tree):
        if is_question(node):
            looked_for |= {name.value for name in (node.args[1],) if isinstance(name, ast.Constant)}
        elif isinstance(node, ast.Try):
            kinds = [inner for handler in node.handlers if handler.type for inner in ast.walk(handler.type)]
            if CATCH & {inner.id for inner in kinds if isinstance(inner, ast.Name)}:
                caught |= {inner for statement in node.body for inner in ast.walk(statement)}
        elif isinstance(node, ast.With) and any("suppress" in ast.unparse(item) for item in node.items):
            caught |= {inner for statement in node.body for inner in ast.walk(statement)}
    return looked_for, caught


def without_another_way(tree: ast.Module, path: str = "") -> list[str]:
    looked_for, caught = guarded(tree)
    return [
        f"{path}:{getattr(node, 'lineno', 0)}: {name}"
        for node, name in private_names(tree)
        if name not in looked_for and node not in caught and name not in WITHOUT
        if not any(isinstance(key, tuple) and path.endswith(key[0]) and name == key[1] for key in WITHOUT)
    ]


def test_what_is_private_in_torch_has_another_way():
    assert [name for path in FILES for name in without_another_way(tree_of(path), str(path.relative_to(ROOT)))] == []


@pytest.mark.parametrize(
    "text",
    [
        "import torch\nlibrary = torch._C\nlibrary._cuda_getDriverVersion()",
        "import torch\ntorch._C._cuda_getDriverVersion()",
        "from torch.distributed.distributed_c10d import _coalescing_manager",
        "from torch._subclasses.fake_tensor import FakeTensorMode",
        "import torch.distributed as dist\ndist.distributed_c10d._get_default_store()",
        "import torch\ntorch.cuda._sleep(1)",
        "def f(tensor):\n    return tensor._backward_hooks",
        "from importlib import import_module\nimport_module('torch.distributed._symmetric_memory')",
    ],
)
def test_a_new_one_is_seen(text):
    assert len(without_another_way(ast.parse(text))) == 1


@pytest.mark.parametrize(
    "text",
    [
        "import torch\nsleep = getattr(torch.cuda, '_sleep', None)",
        "import torch\nif hasattr(torch._C, 'name'):\n    torch._C.name()",
        "try:\n    from torch._subclasses.fake_tensor import Mode\nexcept ImportError:\n    Mode = None",
        "from collections import namedtuple\nnamedtuple('a', 'b')(1)._asdict()",
    ],
)
def test_one_with_another_way_passes(text):
    assert without_another_way(ast.parse(text)) == []
