"""What runs on a thread calls nothing of the device, as far as the syntax tree shows it; see [Note: One issuer].

Functions that a ``Worker`` or a ``Thread`` is given, those under a comment that begins with ``# On the thread``, those
whose docstring does, and what they call in the same file.
"""

import ast
import re
import tokenize
from collections.abc import Iterator
from io import StringIO
from pathlib import Path

import pytest
from places import ROOT

RUNTIME = ROOT / "megatron_ext" / "runtime"
FILES = [path for path in sorted(RUNTIME.rglob("*.py")) if path.name != "host_device.py"]  # where there is no device

BEGINS = ("submit", "_WorkerThread", "Thread")
"""Functions that are given what a thread is to do."""

OF_THE_DEVICE = {"cuda", "device", "_device", "stream", "_stream", "compute", "issuer", "_issuer"}
"""Parts of a dotted name whose methods belong to the issuing thread."""

OF_THE_LINK = {"arriving", "leaving"}
"""The same, of attributes: of a link."""

OF_EVENTS = {"synchronize", "record", "query", "elapsed_time", "wait_event", "wait_stream", "item", "cpu"}
"""Methods of events and streams, and of tensors that would wait for the device."""

MAKES = {"private_flags", "page_locked", "device_of", "unlock_unused", "cudart", "CudaStream", "CudaDevice"}
MAKES |= {"pin_memory", "host_tensor", "pin", "unpin", "cuda"}
"""Functions, and methods of whatever, that lock or unlock memory or make what the driver knows."""

AWAY = {"device", "pin_memory"}
"""Keywords by which any call makes what does not lie in memory of the host alone."""


def marks_of(text: str) -> list[tuple[int, bool]]:
    """Lines with a comment of their own, and whether it says that what follows runs on a thread."""
    found = []
    for token in tokenize.generate_tokens(StringIO(text).readline):
        if token.type == tokenize.COMMENT and token.line.strip() == token.string:
            found.append((token.start[0], "on the thread" in token.string.lower()))
    return found


def dotted(node: ast.AST) -> list[str]:
    """Names of ``a.b.c``; what is called or indexed within it is looked through."""
    if isinstance(node, ast.Attribute):
        return [*dotted(node.value), node.attr]
    if isinstance(node, ast.Name):
        return [node.id]
    if isinstance(node, ast.Call):
        return dotted(node.func)
    return dotted(node.value) if isinstance(node, ast.Subscript) else []


class Source:
    """A file: its functions by name, and those that run on a thread."""

    def __init__(self, text: str):
        tree, self.functions = ast.parse(text), {}  # by whether they are methods, and by name
        methods = {node for owner in ast.walk(tree) if isinstance(owner, ast.ClassDef) for node in owner.body}
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                self.functions.setdefault((node in methods, node.name), []).append(node)
        waiting = [*self._submitted(tree), *self._marked(tree, marks_of(text))]
        self.on_thread: dict[tuple[bool, str], list[ast.FunctionDef]] = {}
        self.lambdas = [node for node in waiting if isinstance(node, ast.Lambda)]
        keys = [key for key in waiting if isinstance(key, tuple)]
        keys += [key for node in self.lambdas for key in self._called(node)]
        while keys:
            key = keys.pop()
            if key not in self.on_thread:
                self.on_thread[key] = self.functions[key]
                keys += [other for node in self.functions[key] for other in self._called(node)]

    def _submitted(self, tree: ast.AST) -> Iterator:
        assigned: dict[str, list[ast.expr]] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign):
                for target in node.targets:
                    assigned.setdefault((dotted(target) or [""])[-1], []).append(node.value)
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call) or (dotted(node.func) or [""])[-1] not in BEGINS:
                continue
            given: list[ast.expr] = [*node.args, *(keyword.value for keyword in node.keywords)]
            seen = set()
            while given:
                for inner in ast.walk(given.pop()):
                    key = self._key(inner)
                    if isinstance(inner, ast.Lambda):
                        yield inner
                    elif key is not None:
                        yield key
                    elif isinstance(inner, ast.Name) and inner.id not in seen:
                        seen.add(inner.id)
                        given += [v for v in assigned.get(inner.id, ()) if isinstance(v, ast.Call | ast.Lambda)]

    def _marked(self, tree: ast.AST, marks: list[tuple[int, bool]]) -> Iterator[tuple[bool, str]]:
        for owner in ast.walk(tree):
            if not isinstance(owner, ast.ClassDef):
                continue
            within = [m for m in marks if owner.lineno < m[0] <= (owner.end_lineno or 0)]
            for node in owner.body:
                if isinstance(node, ast.FunctionDef):
                    before = [said for line, said in within if line < node.lineno and not _inside(owner, line)]
                    text = (ast.get_docstring(node) or "").lower()
                    if (before and before[-1] and node.name != "close") or text.startswith("on the thread"):
                        yield True, node.name

    def _called(self, node: ast.AST) -> Iterator[tuple[bool, str]]:
        """Functions of this file that ``node`` calls or hands on."""
        for inner in ast.walk(node):
            key = self._key(inner)
            if key is not None:
                yield key

    def _key(self, node: ast.AST) -> tuple[bool, str] | None:
        """Of the function of this file, or the method of its own class, that ``node`` names."""
        names = dotted(node) if isinstance(node, ast.Name | ast.Attribute) else []
        key = len(names) > 1, names[-1] if names else ""
        return key if key in self.functions and names[:-1] in ([], ["self"], ["cls"]) else None

    def faults(self) -> list[tuple[int, str]]:
        """Line and name of every call on a thread that belongs to the issuing thread."""
        found = set()
        for node in (*self.lambdas, *(one for nodes in self.on_thread.values() for one in nodes)):
            elsewhere = {inner for one in ast.walk(node) if _asks_where(one) for inner in ast.walk(one.orelse)}
            for call in ast.walk(node):
                if isinstance(call, ast.Call) and call not in elsewhere:
                    *owner, name = dotted(call.func) or [""]
                    if (
                        OF_THE_DEVICE & {*owner}
                        or OF_THE_LINK & {*owner[1:]}
                        or (owner and name in OF_EVENTS)
                        or name in MAKES
                        or _leaves_the_host(call, name)
                    ):
                        found.add((call.lineno, ".".join((*owner, name))))
        return sorted(found)


def _leaves_the_host(call: ast.Call, name: str) -> bool:
    """Whether a call copies to another device, or makes something there, unless what it is given says that it does
    not: a dtype of torch, or the host by its name."""
    given = [keyword.value for keyword in call.keywords if keyword.arg in AWAY] + (call.args if name == "to" else [])
    texts = [ast.unparse(one) for one in given]
    return not all(re.fullmatch(r"torch\.(b?float|u?int)\d+|'cpu'|False", text) for text in texts)


def _asks_where(node: ast.AST) -> bool:
    """``x if on_worker() else y``: ``y`` is for the issuing thread."""
    return isinstance(node, ast.IfExp) and ast.unparse(node.test) == "on_worker()"


def _inside(owner: ast.ClassDef, line: int) -> bool:
    """Whether a comment lies within a method, and not between methods."""
    return any(node.lineno <= line <= (node.end_lineno or 0) for node in owner.body)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(RUNTIME)))
def test_what_runs_on_a_thread_calls_nothing_of_the_device(path):
    assert Source(path.read_text()).faults() == []


@pytest.mark.parametrize(
    ("file", "names"),
    [
        ("publisher.py", {"_write", "_bring", "_end", "_end_of_job"}),
        ("gradients.py", {"_add"}),
        ("routes/drive_copy.py", {"_read"}),
        ("host_step/early.py", {"_step"}),
        ("host_step/delayed.py", {"_step"}),
        ("host_step/room.py", {"wait", "begin", "end"}),
        ("host_step/unit.py", {"begin", "_before_step", "_after_step"}),
        ("host_step/drive_states.py", {"fetch", "put_back"}),
        ("host_step/drive_slots.py", {"read"}),
        ("watch.py", {"_look"}),
    ],
)
def test_what_runs_on_threads_is_found(file, names):
    assert names <= {name for _, name in Source((RUNTIME / Path(file)).read_text()).on_thread}


BAD = """
class Part:
    def submits(self):
        job = partial(self.direct, 1)
        self._worker.submit(job)
        self._worker.submit(lambda transfer: torch.cuda.synchronize())

    def direct(self, transfer):
        self.within()

    def within(self):
        self._device.compute.wait(self.event)

    def issues(self):
        self.stream.copy(a, b)

    # On the thread that steps.

    def steps(self):
        self.event.synchronize()
        self.jobs[0].wait()
        unlock_unused(self.kept)
        own.to(torch.float32).pin_memory()
        own.to("cuda")
        own.to(self.place, torch.bfloat16)
        own.to("cpu", torch.float16)
        own.cuda()
        own = torch.empty(3, device=self.place)
        own = torch.empty(3, dtype=torch.uint8, device="cpu")
        flags = private_flags(1, self.kept)

    # On the issuing thread.

    def gives(self):
        self.stream.record(self.event)

    def read(self, transfer):
        \"\"\"On the thread that reads.\"\"\"
        link.arriving.run(transfer.wait) if on_worker() else self._issuer.join(transfer)
"""


def test_a_call_of_the_device_on_a_thread_is_seen():
    assert [name for _, name in Source(BAD).faults()] == [
        "torch.cuda.synchronize",
        "self._device.compute.wait",
        "self.event.synchronize",
        "unlock_unused",
        "own.to.pin_memory",
        "own.to",
        "own.to",
        "own.cuda",
        "torch.empty",
        "private_flags",
        "link.arriving.run",
    ]
