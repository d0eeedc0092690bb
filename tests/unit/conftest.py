"""Unit tests start no process: they run in parallel, and a machine that is busy does not change what they find."""

import sys

import pytest

STARTS = {"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.exec", "os.system"}
"""Events of Python's audit hooks, see PEP 578."""

_running: list[str] = []


def _refuse(event: str, _) -> None:
    if event in STARTS and _running:
        raise AssertionError(f"{_running[-1]} starts a process ({event}): it belongs into tests/distributed")


sys.addaudithook(_refuse)


@pytest.fixture(autouse=True)
def no_process(request):
    _running.append(request.node.nodeid)
    yield
    _running.pop()


THOROUGH = ("test_search.py", "test_local_search.py", "test_exact.py")
"""Tests of searching itself."""


@pytest.fixture(autouse=True)
def little_effort(request, monkeypatch):
    """Plans are searched for a tenth of the usual effort: other tests hold of every plan, however good."""
    effort, local_search = (sys.modules.get(f"megatron_ext.planner.{name}") for name in ("effort", "local_search"))
    if effort is not None and local_search is not None and request.path.name not in THOROUGH:
        for stage, full in effort.EFFORT.items():
            monkeypatch.setitem(effort.EFFORT, stage, full // 10)
        monkeypatch.setattr(local_search, "MOST_CHANGES", local_search.MOST_CHANGES // 10)
