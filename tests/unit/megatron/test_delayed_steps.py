"""What a delayed parameter update is refused with."""

from types import SimpleNamespace

import pytest
import torch
from msgspec.structs import replace
from planning_cases import make_table, make_workload

from megatron_ext.formats.errors import InputError
from megatron_ext.megatron import hooks
from megatron_ext.megatron.delayed_steps import check, optimizers_on_host
from megatron_ext.planner import plan
from megatron_ext.schedule.user_defined_schedule import StateSlots


@pytest.fixture(scope="module")
def schedule():
    work = make_workload()
    return plan(work, make_table(work), policy="all-gpu")


def test_a_delay_needs_a_schedule_without_other_steps_of_the_host(schedule):
    check(None, schedule)
    check(3, schedule)
    with pytest.raises(InputError, match="--delayed-parameter-update = -1: expected the number of iterations"):
        check(-1, schedule)
    with pytest.raises(InputError, match="s.json: rollback_bytes: steps beside the backward cannot be combined with"):
        check(3, replace(schedule, rollback_bytes=1), "s.json")
    with pytest.raises(InputError, match="state_slots: states on the drive cannot be combined with --delayed-"):
        check(3, replace(schedule, state_slots=StateSlots(slots=2, slot_bytes=4096)))
    with pytest.raises(InputError, match="--delayed-parameter-update = 3: needs --user-defined-schedule"):
        hooks.configure(None, delay=3)


def test_every_parameter_is_stepped_on_the_host():
    parameters = [torch.zeros(2), torch.zeros(3)]
    hybrid = SimpleNamespace(param_groups=[{"params": parameters}], gpu_params_map_cpu_copy={})
    optimizers = [SimpleNamespace(optimizer=hybrid), SimpleNamespace(is_stub_optimizer=True)]
    hybrid.gpu_params_map_cpu_copy = dict.fromkeys(parameters)
    assert optimizers_on_host(optimizers, 3) == [hybrid]
    del hybrid.gpu_params_map_cpu_copy[parameters[1]]
    with pytest.raises(InputError, match="--delayed-parameter-update = 3: needs an optimizer that steps on the host"):
        optimizers_on_host(optimizers, 3)
