"""Plans and verdicts within a test's process are made with less effort: most tests hold of every plan, however good."""

import sys

import pytest

THOROUGH = ("test_gather_search.py", "test_local_search.py", "test_exact.py")
"""Tests of searching itself."""


@pytest.fixture(autouse=True)
def little_effort(request, monkeypatch):
    """A tenth of the usual effort for a search; for a verdict as many perturbed tables as of a large workload."""
    parts = ("effort", "local_search", "gain_interval")
    effort, local_search, gain_interval = (sys.modules.get(f"megatron_ext.planner.{name}") for name in parts)
    if gain_interval is not None:
        monkeypatch.setattr(gain_interval, "MOST", gain_interval.FEWEST)
    if effort is not None and local_search is not None:
        part = 3 if request.path.name in THOROUGH else 10
        for stage, full in effort.EFFORT.items():
            monkeypatch.setitem(effort.EFFORT, stage, full // part)
        monkeypatch.setattr(local_search, "MOST_CHANGES", local_search.MOST_CHANGES // part)
