"""What cannot be tried on a machine: each reason is said, and where it does not hold the case is run."""

import pytest
from case_table import KILL_AND_RESUME, LINKS, TWO_RANKS, Training, jobs
from simulated_lanes import machine
from untried import untried

CASES = [case for job in jobs() for case in job.cases]
TRAININGS = [case for case in CASES if isinstance(case, Training)]
GB = 10**9


def refused(words: str, **place) -> list:
    """Cases of which ``words`` are said there, and that an H200 with all it needs can run."""
    found = [(case, untried(case, machine(**place))) for case in CASES if untried(case, machine()) is None]
    assert all(result is None or result.status == "could not try" for _, result in found)
    return [case for case, result in found if result is not None and words in result.said]


def test_trainings_that_host_memory_cannot_hold_are_not_tried():
    assert refused("of host memory, 400 are free", host_bytes=400 * GB) == []
    few = refused("GB of host memory, 16 are free", host_bytes=16 * GB)
    assert {case.name for case in few if isinstance(case, Training)} == {
        case.name for case in TRAININGS if case.size == "large" and case.on_host
    }
    assert LINKS not in {case.name for case in few}
    assert LINKS in {case.name for case in refused("of host memory", host_bytes=8 * GB)}


def test_on_a_slow_drive_small_cases_are_tried_alone():
    slow = refused("over a drive that moves 125 MB/s (--drive)", drive_rate=125e6)
    assert {case.name for case in slow} == {
        case.name for case in TRAININGS if case.needs_drive and case.size in ("medium", "large")
    }
    assert slow and refused("over a drive", drive_rate=3e9) == []


def test_without_flags_of_streams_only_what_copies_nothing_is_tried():
    found = {
        case.name for case in refused("wait for flags: pip install cuda-bindings", no_flags="pip install cuda-bindings")
    }
    assert found >= {case.name for case in TRAININGS if case.route != "gpu" or case.gradients == "host"}
    assert KILL_AND_RESUME in found and "doctor" not in found and "timing: stock, all on the device" not in found
    assert any(case.name not in found for case in TRAININGS)


@pytest.mark.parametrize("why", ["it is not installed", "it cannot be imported: ImportError: libcudnn.so.9"])
def test_without_transformer_engine_it_is_said_why_there_is_none(why):
    found = refused(f"needs Transformer Engine: {why}", engine=False, no_engine=why)
    assert {case.name for case in TRAININGS if case.on_host} <= {case.name for case in found}


def test_a_device_for_one_process_runs_cases_of_one_rank():
    found = refused("nvidia-smi -c DEFAULT", one_process=True)
    assert found == [case for case in CASES if case.ranks > 1]


def test_shared_memory_is_compared_with_what_the_ranks_of_a_case_take():
    assert refused("/dev/shm", shared_bytes=2 << 30) == []
    found = refused("/dev/shm has 512 MiB free", shared_bytes=512 << 20)
    assert {case.ranks for case in found} == {2, 4}  # doctor asks for a GiB
    assert {case.name for case in found if case.ranks == 2} == {f"doctor{TWO_RANKS}"}
