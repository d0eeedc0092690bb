"""Plans and verdicts within a test's process are made with less effort: most tests hold of every plan, however good."""

import sys

import pytest

THOROUGH = ("test_exact.py",)
"""Tests of searching itself."""


@pytest.fixture(autouse=True)
def little_effort(request, monkeypatch):
    """A search has a tenth of the usual effort and a sixth of the solver's work.

    A verdict has as many perturbed tables as of a large workload.
    """
    parts = ("effort", "gain_interval", "exact")
    effort, gain_interval, exact = (sys.modules.get(f"megatron_ext.planner.{name}") for name in parts)
    search, work = (3, 1) if request.path.name in THOROUGH else (10, 6)
    if gain_interval is not None:
        monkeypatch.setattr(gain_interval, "MOST", gain_interval.FEWEST)
    if effort is not None:
        for stage, full in effort.EFFORT.items():
            monkeypatch.setitem(effort.EFFORT, stage, full // search)
    if exact is not None:
        monkeypatch.setattr(exact, "SMALL", exact.SMALL._replace(work=exact.SMALL.work / work))
