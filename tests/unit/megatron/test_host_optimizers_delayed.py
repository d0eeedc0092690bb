"""What a delayed parameter update is refused with, and when its reference applies what is pending."""

from types import SimpleNamespace

import pytest
import torch
from msgspec.structs import replace
from planning_cases import make_table, make_workload

from megatron_ext.formats.errors import InputError
from megatron_ext.megatron import hooks
from megatron_ext.megatron.host_optimizers import require_steps_on_host
from megatron_ext.megatron.optimizer_of_args import optimizer_settings
from megatron_ext.megatron.reference_delay import ReferenceDelay
from megatron_ext.planner import plan
from megatron_ext.schedule.match import match
from megatron_ext.workload.optimizer_settings import OptimizerSettings


def test_a_delay_needs_a_schedule_without_other_steps_of_the_host():
    work = replace(make_workload(), optimizer=OptimizerSettings(on_host=True, delayed=True))
    schedule = plan(work, make_table(work), policy="all-gpu")
    with pytest.raises(InputError, match="rollback_bytes: steps during the backward cannot be combined with --delayed"):
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


class Model:
    """Has what a release of Megatron calls before it saves and evaluates."""

    def __init__(self):
        self.synced = []

    def start_param_sync(self, *unused, force_sync: bool = False) -> None:
        self.synced.append(force_sync)

    def disable_forward_pre_hook(self, param_sync: bool = True) -> None:  # before 0.16, and to evaluate
        if param_sync:
            self.start_param_sync(force_sync=True)


@pytest.mark.parametrize(
    "force", [Model.disable_forward_pre_hook, lambda model: model.start_param_sync(force_sync=True)]
)
def test_the_reference_applies_what_is_pending_before_parameters_are_gathered_for_a_checkpoint(force):
    parameter = torch.zeros(2, requires_grad=True)
    inner = torch.optim.SGD([parameter], lr=1.0)
    vars(inner)["gpu_params_map_cpu_copy"] = {parameter: None}
    optimizer = SimpleNamespace(step=lambda: (inner.step(), (True, 1.0, None))[1])
    models = [Model(), Model()]
    delay = ReferenceDelay(optimizer, [SimpleNamespace(optimizer=inner)], models, begun=0, delay=0)
    delay.begin()
    parameter.grad = torch.ones(2)
    optimizer.step()
    models[0].start_param_sync()
    models[0].disable_forward_pre_hook(param_sync=False)
    assert parameter.tolist() == [0, 0]
    for model in models:
        force(model)
    assert parameter.tolist() == [-1, -1]
    assert [model.synced for model in models] == [[False, True], [True]]
