"""What goes wrong with copies during training, and changes of parameters behind our back."""

import random

import pytest
from cases import MODELS, STRICT
from draw_schedule import hosted, prepared
from msgspec.structs import replace
from parity_service import Died, differences
from variations import some

from megatron_ext.workload.workload import Limits


@pytest.fixture
def staged(workloads, tmp_path):
    """A schedule of zero stage 3 that reads from the drive; its path and a staged group."""
    workload = replace(workloads[STRICT, "fp32"], zero_stage=3, limits=Limits(nvme_slots=2))
    schedule = prepared(random.Random(3), workload, tmp_path / "s.json", routes=("nvme",))
    group = next(action.group for entry in schedule.ranks[0].steps for action in entry.stage_in)
    return tmp_path / "s.json", group


def test_a_read_that_comes_short_in_training_names_group_and_file(services, staged, tmp_path):
    path, group = staged
    drive = tmp_path / "drive"
    drive.mkdir()
    with pytest.raises(
        Died, match=rf"DriveError: group {group} \(chunk \d\): the file of process \d+ in {drive} ends at byte"
    ):
        services(STRICT).run(
            options=[*MODELS["fp32"], "--user-defined-schedule-nvme-path", str(drive)],
            schedule=path,
            environment={"MEGATRON_EXT_FAULTS": f"short_read={group}"},
            reference=False,
        )
    assert list(drive.iterdir()) == []


@pytest.mark.parametrize(
    "given, said",
    [
        ((), "= None: the schedule publishes to nvme; give a directory"),
        (("--user-defined-schedule-nvme-path", "/dev/shm"), "= '/dev/shm': is on tmpfs, which is memory, not a drive"),
    ],
)
def test_an_nvme_route_needs_a_drive(services, staged, given, said):
    with pytest.raises(Died, match=f"--user-defined-schedule-nvme-path {said}"):
        services(STRICT).run(options=[*MODELS["fp32"], *given], schedule=staged[0], reference=False)


@pytest.mark.parametrize("zero_stage, model", some([(1, "bf16-offload"), (3, "fp32")], 1))
def test_parameters_that_somebody_else_changes(workloads, services, tmp_path, zero_stage, model):
    """Told, copies on the host are made anew; untold, the change is lost: what the comparison can see."""
    hosted(workloads["interleaved", model], zero_stage, tmp_path / "s.json")
    told, silent = (
        services("interleaved").run(
            options=MODELS[model],
            schedule=tmp_path / "s.json",
            meddle=meddle,
            environment={"MEGATRON_EXT_FAULTS": "publish_delay_ms=8"},
        )
        for meddle in ("told", "silent")
    )
    assert differences(told) == []
    assert {"loss", "parameter_sha256"} <= {*differences(silent)}


def test_training_that_goes_on_without_its_schedule(workloads, services, tmp_path):
    hosted(workloads[STRICT, "fp32"], 3, tmp_path / "s.json")
    with pytest.raises(Died, match="ScheduleError: training goes on without its schedule"):
        services(STRICT).run(options=MODELS["fp32"], schedule=tmp_path / "s.json", meddle="go on", reference=False)


def test_parameters_that_nobody_asked_for_are_not_brought_at_the_end(workloads, services, tmp_path):
    """The run ends while copies are still published; who then computes with freed parameters is told so."""
    hosted(workloads[STRICT, "fp32"], 3, tmp_path / "s.json")
    with pytest.raises(Died, match="ScheduleError: training has ended and its parameters were freed"):
        services(STRICT).run(
            options=MODELS["fp32"],
            schedule=tmp_path / "s.json",
            meddle="leave",
            environment={"MEGATRON_EXT_FAULTS": "publish_delay_ms=8"},
            reference=False,
        )


def test_an_optimizer_step_that_the_schedule_is_not_told_of_stops_training(workloads, services, tmp_path):
    """Else the next iteration would compute on parameters of the step before, without an error."""
    hosted(workloads[STRICT, "fp32"], 1, tmp_path / "s.json")
    with pytest.raises(Died, match="1 optimizer steps have changed parameters, but .* was called for 0"):
        services(STRICT).run(options=MODELS["fp32"], schedule=tmp_path / "s.json", meddle="replay", reference=False)


@pytest.mark.nightly
def test_the_first_iteration_computes_with_the_parameters_whatever_the_optimizer_has_loaded(
    workloads, services, tmp_path
):
    """Copies are published from them first, and from the optimizer's behind its step."""
    hosted(workloads["interleaved", "bf16-offload"], 1, tmp_path / "s.json")
    how = dict(options=MODELS["bf16-offload"], schedule=tmp_path / "s.json")
    assert differences(services("interleaved").run(**how, meddle="other states")) == []
