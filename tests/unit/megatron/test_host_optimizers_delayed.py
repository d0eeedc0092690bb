"""What a delayed parameter update is refused with."""

from types import SimpleNamespace

import pytest
import torch
from msgspec.structs import replace
from planning_cases import make_table, make_workload

from megatron_ext.formats.errors import InputError
from megatron_ext.megatron import hooks
from megatron_ext.megatron.host_optimizers import require_steps_on_host
from megatron_ext.megatron.optimizer_of_args import optimizer_settings
from megatron_ext.planner import plan
from megatron_ext.schedule.match import match
from megatron_ext.workload.optimizer_settings import OptimizerSettings


def test_a_delay_needs_a_schedule_without_other_steps_of_the_host():
    work = replace(make_workload(), optimizer=OptimizerSettings(on_host=True, delayed=True))
    schedule = plan(work, make_table(work), policy="all-gpu")
    with pytest.raises(InputError, match="rollback_bytes: steps beside the backward cannot be combined with --delayed"):
        match(replace(schedule, rollback_bytes=1), work)
    with pytest.raises(InputError, match="--delayed-parameter-update = 3: needs --user-defined-schedule"):
        hooks.configure(None, delay=3)
    with pytest.raises(InputError, match="--delayed-parameter-update = -1: expected 0 or more iterations"):
        hooks.configure("s.json", delay=-1)


def test_every_parameter_is_stepped_on_the_host():
    args = SimpleNamespace(bf16=True, fp16=False, optimizer_cpu_offload=True, delayed_parameter_update=0)
    assert optimizer_settings(args).delayed
    args.optimizer_cpu_offload = False
    with pytest.raises(InputError, match="--delayed-parameter-update = 0: needs an optimizer that steps on the host"):
        optimizer_settings(args)
    parameters = [torch.zeros(2), torch.zeros(3)]
    hybrid = SimpleNamespace(param_groups=[{"params": parameters}], gpu_params_map_cpu_copy={})
    optimizers = [SimpleNamespace(optimizer=hybrid)]
    hybrid.gpu_params_map_cpu_copy = dict.fromkeys(parameters)
    require_steps_on_host(optimizers, 3)
    del hybrid.gpu_params_map_cpu_copy[parameters[1]]
    with pytest.raises(InputError, match="--delayed-parameter-update = 3: needs an optimizer that steps on the host"):
        require_steps_on_host(optimizers, 3)
