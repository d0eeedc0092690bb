"""Plans and verdicts within a test's process are made with less effort: most tests hold of every plan, however good."""

import sys

import pytest

THOROUGH = ("test_local_search.py", "test_exact.py")
"""Tests of searching itself."""


@pytest.fixture(autouse=True)
def little_effort(request, monkeypatch):
    """A search has a tenth of the usual effort, a fortieth of the changes and a sixth of the solver's work.

    A verdict has as many perturbed tables as of a large workload.
    """
    parts = ("effort", "local_search", "gain_interval", "exact")
    effort, local_search, gain_interval, exact = (sys.modules.get(f"megatron_ext.planner.{name}") for name in parts)
    search, changes, work = (3, 3, 1) if request.path.name in THOROUGH else (10, 40, 6)
    if gain_interval is not None:
        monkeypatch.setattr(gain_interval, "MOST", gain_interval.FEWEST)
    if effort is not None and local_search is not None:
        for stage, full in effort.EFFORT.items():
            monkeypatch.setitem(effort.EFFORT, stage, full // search)
        monkeypatch.setattr(local_search, "MOST_CHANGES", local_search.MOST_CHANGES // changes)
    if exact is not None:
        for name in ("SMALL", "BETWEEN"):
            full = getattr(exact, name)
            monkeypatch.setattr(exact, name, full._replace(work=full.work / work))
