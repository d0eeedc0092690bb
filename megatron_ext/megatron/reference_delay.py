"""The reference of the delayed parameter update: Megatron's own step, one iteration later, without any overlap.

Gradients and settings of an iteration are kept as copies. The next step uses these copies in place of its own values,
steps as Megatron does, and then keeps its own values in turn. There are no threads and no staging.
"""

from functools import partial

import torch

from megatron_ext.megatron.host_optimizers import require_steps_on_host, settings_of


class ReferenceDelay:
    """Delays the updates of a run in which Megatron gathers.

    Args:
        optimizer: Megatron's optimizer of the run.
        parts: its DistributedOptimizer objects that have parameters to step.
        ddps: the model chunks.
        begun: the number of training iterations that ended before this run.
        delay: the number of first iterations whose updates are not delayed.

    Raises:
        InputError: an optimizer does not step on the host.
    """

    def __init__(self, optimizer, parts: list, ddps: list, begun: int, delay: int):
        self._iteration, self._delay, self._pending = begun, delay, {}
        require_steps_on_host(parts, delay)
        for inner in (part.optimizer for part in parts):
            vars(inner)["step"] = partial(self._step, inner, inner.step)
        vars(optimizer)["step"] = partial(self._step_or_skip, optimizer.step)
        for ddp in ddps:  # Megatron forces a sync before it evaluates, saves and hashes
            vars(ddp)["start_param_sync"] = partial(self._apply_and, ddp.start_param_sync)

    def begin(self) -> None:
        """A training iteration begins."""
        self._iteration += 1

    def apply(self) -> None:
        """Apply the pending update, if there is one."""
        for inner in list(self._pending):
            self._apply_one(inner)

    def _apply_and(self, start_param_sync, *args, force_sync: bool = False, **how) -> None:
        if force_sync:
            self.apply()
        start_param_sync(*args, force_sync=force_sync, **how)

    def _step_or_skip(self, step, *args, **kwargs):
        result = step(*args, **kwargs)
        if not result[0]:
            self.apply()
        return result

    def _step(self, inner, step, closure=None) -> None:
        if self._iteration <= self._delay:
            step(closure)
            return
        if inner in self._pending:
            self._apply_one(inner)
        gradients = [(parameter, name, gradient.clone()) for parameter, name, gradient in _gradients(inner)]
        self._pending[inner] = step, gradients, settings_of(inner)

    @torch.no_grad()
    def _apply_one(self, inner) -> None:
        step, gradients, settings = self._pending.pop(inner)
        now, settings_now = _gradients(inner), settings_of(inner)
        _put(inner, gradients, settings)
        step()
        for parameter, name, _ in gradients:  # between two iterations Megatron keeps none
            setattr(parameter, name, None)
        _put(inner, now, settings_now)


def _gradients(inner) -> list[tuple[torch.Tensor, str, torch.Tensor]]:
    """``(parameter, attribute, gradient)`` for each gradient, as the host optimizer looks them up."""
    parameters = [parameter for group in inner.param_groups for parameter in group["params"]]
    named = [(one, "decoupled_grad" if hasattr(one, "decoupled_grad") else "grad") for one in parameters]
    return [(one, name, gradient) for one, name in named if (gradient := getattr(one, name)) is not None]


def _put(inner, gradients: list, settings: list[dict]) -> None:
    for parameter, name, gradient in gradients:
        setattr(parameter, name, gradient)
    for group, own in zip(inner.param_groups, settings, strict=True):
        group.update(own)
