"""Differences between releases of Megatron are listed and asked for in one file."""

import re
import sys

import pytest
from places import ROOT

from megatron_ext.megatron import late_memory, late_model, releases, states_on_device

ROOM = ROOT / "megatron_ext" / "megatron"
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in releases.__doc__.splitlines()
    if re.match(r"\| 0\.", line)
]
BENCH = ("cpu_compat.py", "megatron_on_cpu.py")
"""Of the CPU test bench: each of their steps names the releases that need it."""
FILES = [path for path in sorted(ROOM.glob("*.py")) if path.name not in ("releases.py", *BENCH)]
QUESTIONS = r"\bhasattr\(|inspect\.signature|package_info|core\.__version__|\b(up to|since|from|before) 0\.\d+"
PROBES = re.compile(QUESTIONS, re.IGNORECASE)
NOT_OF_A_RELEASE = {
    "boundaries.py": 1,  # of torch
    "checkpoint_states.py": 1,  # whether we have replaced it
    "host_gradients.py": 1,  # whether we have replaced it
    "layer_runners.py": 1,  # which module is a router
    "late_memory.py": 3,  # whether we have replaced it
    "late_model.py": 1,  # whether we have replaced it
    "reference_delay.py": 1,  # which gradient Megatron steps on
    "saved_activations.py": 2,  # whichever settings and states there are
    "shards.py": 1,  # which optimizer it is
    "states_on_device.py": 1,  # whether we have replaced it
    "workload_of_run.py": 2,  # whose options they are
}
"""Questions in other files that no release is told by, and how many."""


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_no_other_file_asks_what_a_release_brings(path):
    found = [line.strip() for line in path.read_text().splitlines() if PROBES.search(line)]
    assert len(found) == NOT_OF_A_RELEASE.get(path.name, 0), found


def test_every_difference_is_asked_for_where_the_list_says():
    assert len(ROWS) > 9 and [row[0] for row in ROWS] == sorted((row[0] for row in ROWS), key=float_of)
    asked = {name.strip() for _, _, names, _ in ROWS for name in names.split(",")} - {"-"}
    assert asked == {name for name in vars(releases) if name in asked or _is_question(name)}
    for _, what, name, files in ROWS:
        for file in files.split(", "):
            text = (ROOM / file).read_text()
            assert name == "-" or re.search(rf"\b{name}\(", text), (what, file)


def float_of(release: str) -> tuple[int, ...]:
    return tuple(map(int, release.split(".")))


def _is_question(name: str) -> bool:
    value = vars(releases)[name]
    return getattr(value, "__module__", "") == releases.__name__


def test_what_a_function_does_not_take_is_left_out():
    def function(known, more=0): ...

    assert releases.accepted(function, known=1, unknown=2) == {"known": 1}
    assert releases.accepts(function, "more") and not releases.accepts(function, "unknown")
    assert releases.has_all(releases, "has_all", "accepts") and not releases.has_all(releases, "has", "nothing")


def test_older_releases_have_no_optimizer_on_the_host(monkeypatch):
    """Before core_v0.12. What every run does to the class is done to its stand-in."""
    monkeypatch.setitem(sys.modules, "megatron.core.optimizer.cpu_offloading.hybrid_optimizer", None)
    found = releases.host_optimizer_class()
    for module in (late_memory, late_model, states_on_device):
        monkeypatch.setattr(module, "HybridDeviceOptimizer", found)
    late_memory.tell_what_is_not_locked()
    states_on_device.keep_states_on_device([])
    late_memory.make_gradients([], [])
    assert found.not_locked is None and found.dummy_step is not None
