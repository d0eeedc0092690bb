"""Limits of a node against what a plan needs."""

import resource
from pathlib import Path

import pytest

from megatron_ext.doctor.node_limits import host, locked_memory, shared
from megatron_ext.doctor.place import DoctorOptions

PLAN = DoctorOptions(out="", need_bytes=2 << 30)
NO_PLAN = DoctorOptions(out="")


@pytest.mark.parametrize(
    ("limit", "on_cuda", "options", "status"),
    [
        (resource.RLIM_INFINITY, True, PLAN, "pass"),
        (4 << 30, True, PLAN, "pass"),
        (8 << 20, True, PLAN, "pass"),  # Docker's default, with which the driver page-locks as much as it is asked to
        (8 << 20, True, NO_PLAN, "pass"),
        (8 << 20, False, PLAN, "could not try"),
    ],
)
def test_locked_memory(limit, on_cuda, options, status):
    assert locked_memory(limit, on_cuda, options).status == status


def test_a_small_limit_says_both_figures_and_how_to_raise_it():
    found = locked_memory(8 << 20, True, PLAN)
    assert found.found == "limit 8.0 MiB, the schedule needs 2.0 GiB" and "--ulimit memlock=-1" in found.advice
    assert not locked_memory(4 << 30, True, PLAN).advice


@pytest.mark.parametrize(
    ("available", "options", "status"),
    [(None, PLAN, "could not try"), (1 << 30, NO_PLAN, "pass"), (3 << 30, PLAN, "pass"), (1 << 30, PLAN, "fail")],
)
def test_host_memory(available, options, status):
    assert host(available, options).status == status


def test_shared_memory_that_is_small_or_absent(tmp_path, monkeypatch):
    assert shared(Path("/no/such/place"), 2).status == "could not try"
    monkeypatch.setattr("megatron_ext.doctor.node_limits.LEAST_SHARED_BYTES", 1 << 60)
    assert shared(tmp_path, 2).status == "fail" and shared(tmp_path, 1).status == "pass"
