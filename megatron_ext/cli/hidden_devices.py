"""Hide devices from verbs that describe and plan: they use none, and give the same output with a device as without.

torch looks for devices when they are first needed, so they are hidden before anything imports torch. The facts about
this machine come from another process, in which the devices are visible.
"""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator

from megatron_ext.cpubench import allocator
from megatron_ext.formats.errors import InputError, one_line
from megatron_ext.formats.facts import Facts

VERBS = ("advise", "balance", "cost", "describe", "fit", "plan")

VARIABLE = "CUDA_VISIBLE_DEVICES"

ASK = "import json, sys; from megatron_ext.runtime import machine; print(json.dumps(machine.environment(sys.argv[1])))"

_shown: list[dict[str, str]] = []
"""The environments from before devices were hidden, the innermost last."""


@contextlib.contextmanager
def hidden_from(words: list[str]) -> Iterator[None]:
    """Hide devices if the command line ``words`` begins with one of :data:`VERBS`."""
    if next((word for word in words if not word.startswith("-")), None) not in VERBS:
        yield
        return
    _shown.append(dict(os.environ))
    os.environ[VARIABLE] = ""
    try:
        yield
    finally:
        before = _shown.pop().get(VARIABLE)
        del os.environ[VARIABLE]
        if before is not None:
            os.environ[VARIABLE] = before


def this_machine(device: str = "auto") -> dict[str, Facts]:
    """The result of :func:`megatron_ext.runtime.machine.environment` with devices visible.

    Raises:
        InputError: the process that was asked failed.
    """
    environment = _shown[-1] if _shown else dict(os.environ)
    if not allocator.may_have_cuda(environment):
        from megatron_ext.runtime import machine

        return machine.environment(device)
    asked = subprocess.run(
        [sys.executable, "-c", ASK, device], env=environment, capture_output=True, text=True, check=False
    )
    if asked.returncode:
        last = (asked.stderr.strip().splitlines() or ["no error text"])[-1]
        raise InputError(f"this machine's devices cannot be queried: {one_line(last, 300)}", field="--this-machine")
    return json.loads(asked.stdout.splitlines()[-1])
