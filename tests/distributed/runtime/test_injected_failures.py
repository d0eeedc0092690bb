"""A background thread that fails, wherever it does, ends every rank within two seconds; so does a run that stalls.

Here at every sixteenth call site of a thread; in tests/nightly at all of them.
"""

import json
import subprocess
import sys
from statistics import median

import pytest
from places import HELPERS
from training import environment
from variations import ALL

from megatron_ext.launch.launcher import PEER_LOST_CODE

EVERY = 1 if ALL else 16
THREADS = """publish publisher publisher-arrivals cpu-route nvme-read nvme-copy drive cpu-shard-copies cpu-shard-gathers
    hierarchical states-read gradients-arrive parameters-leave parameters-return watch""".split()


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> list[dict]:
    """What became of two ranks, by the place at which a background thread of rank 0 failed."""
    folder = tmp_path_factory.mktemp("injected")
    command = [sys.executable, str(HELPERS / "injected_failures.py"), str(folder), str(EVERY)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def test_every_background_thread_is_there(runs):
    assert {run["site"][0].removeprefix("megatron_ext-") for run in runs if run["site"]} == {*THREADS}


def test_a_failure_at_any_call_site_ends_all_ranks(runs):
    reached = [run for run in runs if run["seconds"] is not None]
    assert len(reached) > 0.95 * (len(runs) - 1) > 240 / EVERY  # the others were not reached once in six runs
    wrong = [(run["site"], run["codes"], run["said"]) for run in reached if run["codes"] != [1, PEER_LOST_CODE]]
    assert not wrong, wrong[:3]
    # A rank may end by what its failure does to another thread of its own before it has said more.
    assert sum("Injected: at " in run["said"][0] for run in reached) > 0.95 * len(reached)
    # Other programs on the machine make it slower.
    seconds = [run["seconds"] / run["slower"] for run in reached]
    assert median(seconds) < 1 and max(seconds) < 3


def test_a_run_that_stalls_says_where_every_group_and_thread_is(runs):
    (stalled,) = (run for run in runs if run["site"] is None)
    assert 1 in stalled["codes"] and not stalled["hangs"]
    assert {*stalled["codes"]} <= {1, PEER_LOST_CODE}  # the one that ends last may see the other one go
    first, second = stalled["said"]
    assert "megatron-ext: rank 0: no step has ended for 1 s" in first and "rank 1: no step has ended" in second
    for said in stalled["said"]:
        assert "iteration 1 of this schedule: 0 of 1 forwards have begun" in said
        assert (
            "group 0 (chunk 0): unsharding, version 2 of 2; published at versions [2, 2], by rank of the node" in said
        )
        assert "group 2 (chunk 0): unsharding, version 2 of 2\n" in said
        assert "thread megatron_ext-publisher: " in said
    assert "thread MainThread: all_reduce" in first and "thread MainThread: train (" in second
