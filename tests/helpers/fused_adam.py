"""A device's optimizer that is not the host's: where it keeps its step count, and in how it rounds, it is like
Transformer Engine's FusedAdam, which needs a GPU."""

import contextlib
from unittest import mock

import torch
from megatron.core import optimizer as upstream
from megatron.core.optimizer import distrib_optimizer


class FusedAdam(torch.optim.Optimizer):
    """AdamW in plain PyTorch. Its count of steps is in the parameter groups, as ``step``."""

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0):
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self, closure=None) -> None:
        for group in self.param_groups:
            group["step"] = count = group.get("step", 0) + 1
            first, second = group["betas"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                for name in ("exp_avg", "exp_avg_sq") if not state else ():
                    state[name] = torch.zeros_like(parameter)
                mean = state["exp_avg"].mul_(first).add_((1 - first) * parameter.grad)
                square = state["exp_avg_sq"].mul_(second).add_((1 - second) * parameter.grad**2)
                change = mean / (1 - first**count) / ((square / (1 - second**count)).sqrt() + group["eps"])
                parameter -= group["lr"] * (change + group["weight_decay"] * parameter)


@contextlib.contextmanager
def fused():
    """Megatron takes :class:`FusedAdam` for the device's optimizer while the context lasts."""
    with (
        mock.patch.object(upstream, "Adam", FusedAdam),
        mock.patch.object(distrib_optimizer, "HAVE_APEX_OR_TE", True),
        mock.patch.object(distrib_optimizer, "USING_TE_OPTIMIZER", True),
    ):
        yield
