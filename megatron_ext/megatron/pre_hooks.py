"""Megatron's module pre-hooks, which wait for gathers, are taken off a scheduled chunk."""

import inspect
from collections.abc import Callable


def replace_pre_hooks(ddp, unshard_all: Callable[[], None]) -> None:
    """Take Megatron's module pre-hooks off a chunk: the program waits for groups instead.

    Callers that switch the hooks off (evaluation, checkpoints) need all parameters whole: ``unshard_all`` is called.
    """
    if ddp.use_forward_hook:
        # 0.10 has no param_sync and always synchronises, which our bucket groups ignore so far.
        accepted = inspect.signature(ddp.disable_forward_pre_hook).parameters
        ddp.disable_forward_pre_hook(**({"param_sync": False} if "param_sync" in accepted else {}))

    def enable() -> None:
        """The program is always on."""

    def disable(param_sync: bool = True) -> None:
        if param_sync:
            unshard_all()

    ddp.enable_forward_pre_hook, ddp.disable_forward_pre_hook = enable, disable
