"""Every event, wait, record and flag in runtime/, found by syntax; one at a time can be taken away.

``install`` before the package is imported: each call of a name in :data:`NAMES` becomes
``(None if a switch says so else the call)``.
"""

import ast
import importlib.machinery
import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace

from places import ROOT

VARIABLE = "MEGATRON_EXT_TEST_ORDERINGS"
"""In the environment of ranks that are to have switches."""

RUNTIME = ROOT / "megatron_ext/runtime"

NAMES = {
    *("record", "wait", "wait_event", "wait_flag", "store", "poll", "synchronize", "settle", "join", "_wait"),
    *("wait_for_copy", "wait_for_arrivals", "wait_for_leaves", "wait_for_gradients", "wait_for_write"),
    *("wait_on_thread", "end_reads", "when"),
}
"""Of calls that order something. ``when`` issues at once where it is taken away."""

NOT_OF_STREAMS = {
    *("watch.py", "recorder.py", "drive.py", "stream_flags.py", "debug.py", "census.py"),
    *("flags.py", "host_device.py", "worker.py", "issuer.py"),
}
"""Files whose calls of these names are threads' own, or what all the others are made of."""

NOT_ON_A_DEVICE = {("device.py", "settle"), ("host_pool.py", "fail")}
"""Functions, by file and name, that no training on a CUDA device of this machine comes by: of ``measure``, and of a
rank that fails."""

switch = SimpleNamespace(off=None, reached=set())
"""``off``: the site that is taken away; ``reached``: sites that were called."""


class _Sites(ast.NodeTransformer):
    def __init__(self, file: str):
        self.file, self.found = file, []

    def visit_FunctionDef(self, node: ast.FunctionDef):
        if (self.file, node.name) not in NOT_ON_A_DEVICE:
            self.generic_visit(node)
        return node

    def visit_Call(self, node: ast.Call):
        self.generic_visit(node)
        function = node.func
        name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", None)
        value = getattr(function, "value", None)
        if name not in NAMES or isinstance(value, ast.Constant):  # or text.join
            return node
        if name == "poll" and value is not None:  # Issuer.poll, without which work is issued later
            return node
        site = f"{self.file}:{node.lineno} {name}"
        self.found.append(site)
        test = ast.parse(f"__ordering__({site!r})", mode="eval").body
        if name == "when":
            ready = ast.IfExp(test=test, body=node.args[0], orelse=ast.parse("lambda: True", mode="eval").body)
            node.args[0] = ast.copy_location(ready, node)
            return node
        return ast.copy_location(ast.IfExp(test=test, body=node, orelse=ast.Constant(None)), node)


def _changed(path: Path) -> tuple[ast.Module, list[str]]:
    sites = _Sites(path.name)
    tree = ast.fix_missing_locations(sites.visit(ast.parse(path.read_text(), str(path))))
    return tree, sites.found


def sites() -> list[str]:
    """``file:line name`` of every call."""
    files = [path for path in sorted(RUNTIME.rglob("*.py")) if path.name not in NOT_OF_STREAMS]
    return [site for path in files for site in _changed(path)[1]]


def _stays(site: str) -> bool:
    switch.reached.add(site)
    return site != switch.off


class _Finder:
    def find_spec(self, name, path=None, target=None):
        if not name.startswith("megatron_ext.runtime."):
            return None
        file = RUNTIME.joinpath(*name.split(".")[2:]).with_suffix(".py")
        if not file.is_file() or file.name in NOT_OF_STREAMS:
            return None
        return importlib.util.spec_from_file_location(name, file, loader=_Loader(name, str(file)))


class _Loader(importlib.machinery.SourceFileLoader):
    def exec_module(self, module):
        module.__dict__["__ordering__"] = _stays
        exec(compile(_changed(Path(self.path))[0], self.path, "exec"), module.__dict__)


def install() -> None:
    """Let runtime/ be imported with switches."""
    sys.meta_path.insert(0, _Finder())
