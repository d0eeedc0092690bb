"""Fuzzing in small, on the inputs that take milliseconds, and that the harness sees what it is there to see."""

import random
import sys
from types import SimpleNamespace

import pytest
import robustness
import robustness_fuzzing
import robustness_inputs
import robustness_jobs
import robustness_kills
from robustness_inputs import NAMES, Kind, kinds, mutated

from megatron_ext.formats import json_files

EXAMPLES = 40


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fuzzing")
    return folder, kinds(folder)


@pytest.mark.parametrize("name", [name for name in NAMES if not name.startswith(("checkpoint", "corpus", "hybrid"))])
def test_changed_inputs_are_accepted_or_refused_in_one_line(place, monkeypatch, name):
    folder, every = place
    monkeypatch.chdir(folder)
    tried = robustness_fuzzing.Tried(folder, every[name], folder / "found.json")
    for seed in range(EXAMPLES if "." not in name else EXAMPLES // 10):
        draw = random.Random(f"{name} {seed}")
        tried(mutated(draw, draw.choice(every[name].seeds)))
    tried.save()
    assert tried.inputs and not tried.failures


def fails(file, data):
    raise KeyError("missing")


def chats(file, data):
    print("one\ntwo", file=sys.stderr)
    return 2


def spins(file, data):
    while True:
        pass


@pytest.mark.parametrize(
    ("use", "said"), [(fails, "KeyError"), (chats, "two"), (spins, "hang"), (lambda file, data: 1, "exit code 1")]
)
def test_what_is_no_refusal_counts_as_a_failure(tmp_path, monkeypatch, use, said):
    monkeypatch.setattr(robustness_fuzzing, "LONGEST_SECONDS", 0.2)
    tried = robustness_fuzzing.Tried(tmp_path, Kind((b"1",), "f.json", use), tmp_path / "found.json")
    tried(b"1")
    tried(b"1")  # the same again is no new input
    assert tried.inputs == 1 and [said in key for key in tried.failures] == [True]


@pytest.mark.parametrize("kept", [True, False])
def test_an_input_that_ends_the_program_counts_as_a_failure(tmp_path, monkeypatch, kept):
    """As a crash of the interpreter does, which no handler in it sees."""
    monkeypatch.setattr(robustness, "ENGINES", {"hypothesis": 7})
    monkeypatch.setattr(robustness_inputs, "NAMES", ["w.json"])
    out = tmp_path / "w.json.hypothesis.json"

    def run(program, **_):
        if "7" not in program:  # whether there is such an engine
            return SimpleNamespace(returncode=0)
        if kept:
            json_files.save(out, robustness.NOTHING_FOUND | {"inputs": 50})
        return SimpleNamespace(returncode=-11)

    monkeypatch.setattr(robustness.subprocess, "run", run)
    robustness.fuzz(tmp_path)
    result = {"fuzzing": robustness.fuzzing_summary(tmp_path)}
    assert result["fuzzing"]["hypothesis"]["inputs"] == (50 if kept else 0)
    assert robustness.wrong(result) == ["hypothesis: w.json: ended with code -11"]


class Endless(robustness_jobs.Job):
    """Runs until it is killed: whoever looks a third time."""

    def __init__(self):
        self.hung, self._looks = False, iter([True, True])

    def running(self) -> bool:
        return next(self._looks, False)

    def processes(self) -> list[int]:
        return []


def test_a_job_that_had_to_be_killed_hangs_whoever_asks_again():
    job = Endless()
    assert not job.wait(seconds=0) and not job.wait(seconds=0)


GOOD = {
    "signal": "SIGKILL",
    "point": "end",
    "rank": 1,
    "code": 1,
    "hangs": False,
    "leftovers": [],
    "half_written": [],
    "named": True,
}
AGAIN = {"code": 0, "hangs": False, "differences": [], "leftovers": []}


@pytest.mark.parametrize(
    "change",
    [
        {"hangs": True},
        {"leftovers": ["port 1"]},
        {"named": False},
        {"differences": ["loss"]},
        {"met": False},
        {"signal": "SIGSTOP"},  # who only stood still goes on
        *({"resumed": AGAIN | more} for more in ({"code": 1}, {"differences": ["loss"]}, {"leftovers": ["port 1"]})),
    ],
)
def test_a_fault_that_went_wrong_is_counted(change):
    assert not robustness_kills.went_wrong(GOOD | {"resumed": AGAIN})
    assert robustness_kills.went_wrong(GOOD | {"resumed": AGAIN} | change)
