"""Environment variables that GPU libraries read once, as they start: set before Megatron is imported.

Variables that the user has set stay as they are. Without a GPU they have no effect.
"""

from collections.abc import Iterable, MutableMapping, Sequence

SCHEDULED = {
    # Before torch 2.8 a buffer that a collective has used is reused only when an event on the collective's own stream
    # has passed, so whole parameters that a schedule frees would stay allocated.
    "TORCH_NCCL_AVOID_RECORD_STREAMS": "1"
}
"""For runs by a schedule."""

REPEATABLE = {
    # Otherwise the backward of attention adds in an undefined order: Transformer Engine's list of variables.
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # torch's notes on reproducibility
    "NCCL_NVLS_ENABLE": "0",  # the switch adds in an order of its own
}
"""For runs that are compared to the last bit: without them two runs of the same training may differ."""


def prepare(arguments: Sequence[str], environment: MutableMapping[str, str]) -> list[str]:
    """Set in ``environment`` what a training script with these ``arguments`` needs; returns the names that were not
    set before."""
    given = {argument.partition("=")[0] for argument in arguments}
    new = []
    for option, variables in (("--user-defined-schedule", SCHEDULED), ("--user-defined-schedule-check", REPEATABLE)):
        if option in given:
            new += [name for name in variables if name not in environment]
            environment.update({name: variables[name] for name in variables if name not in environment})
    return new


def said_of_early_import(names: Sequence[str], modules: Iterable[str]) -> str | None:
    """A warning that Megatron was already among the imported ``modules`` when ``names`` were set; None if it was not,
    or if nothing was set."""
    early = next((name for name in modules if name.split(".")[0] == "megatron"), None)
    if early is None or not names:
        return None
    return (
        f"{early} is imported above the first hook, so libraries may have started without {', '.join(names)}; set them "
        "in the launch script"
    )
