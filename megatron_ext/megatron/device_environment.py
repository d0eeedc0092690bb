"""Variables that libraries on a GPU read once, as they start: set before Megatron is imported.

What the user has set stays. Without a GPU nobody reads them.
"""

from collections.abc import Iterable, MutableMapping, Sequence

SCHEDULED = {
    # Before torch 2.8 a buffer that a collective has used is taken again only when an event on the collective's own
    # stream has passed, so that whole parameters that a schedule frees would stay allocated.
    "TORCH_NCCL_AVOID_RECORD_STREAMS": "1"
}
"""For runs by a schedule."""

REPEATABLE = {
    # Otherwise the backward of attention adds in an order of chance: Transformer Engine's list of variables.
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # torch's notes on reproducibility
    "NCCL_NVLS_ENABLE": "0",  # the switch adds in an order of its own
}
"""For runs that are compared to the last bit: without them a run may differ from itself."""


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
    """What to say where Megatron is among the imported ``modules`` already as ``names`` are set; None where it is not,
    or nothing was set."""
    early = next((name for name in modules if name.split(".")[0] == "megatron"), None)
    if early is None or not names:
        return None
    return (
        f"{early} is imported above the first hook, so libraries may have started without {', '.join(names)}; set them "
        "in the launch script"
    )
