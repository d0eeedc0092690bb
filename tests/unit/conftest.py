"""Unit tests start no process: they run in parallel, and a machine that is busy does not change what they find."""

import sys

import pytest

from megatron_ext.planner import in_processes

STARTS = {"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.exec", "os.system"}
"""Events of Python's audit hooks, see PEP 578."""

OF_IMPORTS = {"fc-list", "/sbin/ldconfig"}
"""Programs that other packages start once: matplotlib for its fonts, at the first picture on a machine, and torch for
CUDA 13 for a library, when it is imported."""

_running: list[str] = []


def _refuse(event: str, details: tuple) -> None:
    if event in STARTS and _running and not (details and details[0] in OF_IMPORTS):
        raise AssertionError(f"{_running[-1]} starts a process ({event}): it belongs into tests/distributed")


sys.addaudithook(_refuse)


@pytest.fixture(autouse=True)
def no_process(request, monkeypatch):
    monkeypatch.setattr(in_processes, "WORTH", float("inf"))  # tests/distributed/planner divides planning
    _running.append(request.node.nodeid)
    yield
    _running.pop()
