"""What the doctor trains by, and what it says of it."""

import pytest
from msgspec.structs import replace
from planning_cases import make_workload

from megatron_ext.doctor import training_check
from megatron_ext.doctor.training_check import (
    CASES,
    SLOTS,
    Case,
    judged,
    schedule_by_route,
    with_all_on_host,
    with_states_spread,
)
from megatron_ext.megatron import cpu_compat, refusals
from megatron_ext.schedule.match import match
from megatron_ext.schedule.validate import validate
from megatron_ext.workload.optimizer_settings import OptimizerSettings


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.check)
def test_every_case_goes_by_its_route(case):
    slots = SLOTS if case.route == "nvme" else 0
    work = make_workload(
        pp=1, vp=1, dp=2, layers=5, order="no_pipeline", zero_stage=case.zero_stage, gpus_per_node=2, nvme_slots=slots
    )
    if case.cast is not None or case.all_on_host:
        work = replace(work, optimizer=OptimizerSettings(on_host=True))
    schedule = schedule_by_route(work, case.route)
    if case.cast is not None:
        schedule = with_states_spread(schedule, work, case.cast, drive=True)
        assert {group.states_rest for group in schedule.groups} == {None, "device", "nvme"}
    if case.all_on_host:
        schedule = with_all_on_host(schedule, work)
        assert {(group.shard_rests, group.gradients) for group in schedule.groups} == {("host", "host")}
    match(validate(schedule), work)
    assert schedule.routes in ({case.route}, {case.route, "gpu"} if case.route == "nvme" else {case.route})


CASE = Case("cpu", 3)


def test_a_megatron_that_cannot_be_imported_is_a_finding_of_its_own(monkeypatch):
    """The other checks are made, and no training tries to import it again."""

    def root():
        raise ModuleNotFoundError("No module named 'triton'")

    monkeypatch.setattr(cpu_compat, "install", lambda: False)
    monkeypatch.setattr(refusals, "megatron_root", root)
    training_check.megatron.cache_clear()
    found = training_check.ready()
    training_check.megatron.cache_clear()
    assert found.status == "fail" and "ModuleNotFoundError(\"No module named 'triton'\")" in found.found


def test_equal_runs_pass():
    assert judged(CASE, "local layers", [(True, True), (True, True)], 3).status == "pass"


def test_a_rank_that_differs_fails_and_is_named():
    finding = judged(CASE, "local layers", [(True, True), (True, False)], 3)
    assert finding.status == "fail" and "NOT EQUAL" in finding.found and finding.found.endswith("ranks 1")


def test_a_reference_that_differs_from_itself_decides_nothing():
    finding = judged(CASE, "local layers", [(True, False), (False, False)], 3)
    assert finding.status == "fail" and "second training" in finding.found and "NVTE" in finding.advice
