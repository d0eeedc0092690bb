"""Megatron's module pre-hooks, which wait for gathers, are taken off a scheduled chunk."""

from collections.abc import Callable

from megatron_ext.megatron.releases import accepted


def replace_pre_hooks(ddp, unshard_all: Callable[[], None]) -> None:
    """Take Megatron's module pre-hooks off a chunk: the program waits for groups instead.

    Callers that switch the hooks off (evaluation, checkpoints) need all parameters whole: ``unshard_all`` is called.
    """
    if ddp.use_forward_hook:
        # Without param_sync it always synchronises, which our bucket groups ignore so far.
        ddp.disable_forward_pre_hook(**accepted(ddp.disable_forward_pre_hook, param_sync=False))

    def enable() -> None:
        """The program is always on."""

    def disable(param_sync: bool = True) -> None:
        if param_sync:
            unshard_all()

    ddp.enable_forward_pre_hook, ddp.disable_forward_pre_hook = enable, disable
