"""Train an unmodified Megatron on a machine without a GPU: calls of torch.cuda are answered for the CPU.

Megatron-LM asserts a CUDA device, makes its tensors on it and reads its state. None of this
decides what is computed. If there is no device, :func:`install` lets every such call refer to
the CPU instead, and removes the three things that cannot work here. It is for tests and for
trying out a schedule: streams and events do nothing, so it says nothing about overlap.

A run also needs these options: ``--distributed-backend gloo --transformer-impl local
--no-persist-layer-norm --no-gradient-accumulation-fusion --no-masked-softmax-fusion
--no-bias-gelu-fusion --no-bias-dropout-fusion --no-rope-fusion``.

``megatron-ext run-on-cpu -- pretrain_gpt.py ...`` gives all of them but ``--transformer-impl local``, and runs an
unpatched tree as well.
"""

import atexit
import os
import runpy
import sys
import typing
import warnings

import torch

from megatron_ext.cpubench import cuda_stand_in, ordered_collectives, parser_options
from megatron_ext.formats.errors import InputError
from megatron_ext.megatron import megatron_on_cpu

_installed = False


def install(*, even_with_a_device: bool = False) -> bool:
    """Let torch.cuda answer for the CPU; call before any module of Megatron is imported.

    Args:
        even_with_a_device: install without looking for a CUDA device; this process uses none.

    Returns:
        Whether it was installed: not on a machine with a CUDA device, unless ``even_with_a_device``.

    Raises:
        InputError: a module of Megatron was imported before.
    """
    global _installed
    if not hasattr(typing, "override"):  # before Python 3.12; Megatron from 0.18 on imports it
        setattr(typing, "override", lambda method: method)  # noqa: B010 - not in its types
    if _installed or (not even_with_a_device and torch.cuda.is_available()):
        return _installed
    first = next((name for name in sys.modules if name.split(".")[0] == "megatron"), None)
    if first is not None:
        raise InputError(
            "CPU compatibility must be installed before megatron is imported; "
            "the training script imports it above its first hook",
            field="module",
            value=first,
        )
    megatron_on_cpu.prepare()
    cuda_stand_in.install()
    megatron_on_cpu.replace()
    # Megatron reads this attribute on purpose, and the warning would name our file.
    warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
    ordered_collectives.install()
    atexit.register(_leave_process_groups)
    _installed = True
    return True


def is_installed() -> bool:
    """Whether this process trains on the CPU."""
    return _installed


def _leave_process_groups() -> None:
    """Destroy process groups at the end. gloo's threads that still run when the process ends abort it
    now and then, after training is done, and Megatron does not always destroy its groups.

    Not after an error: gloo would wait for ranks that never come, and delay the launcher."""
    if torch.distributed.is_initialized() and getattr(sys, "last_value", None) is None:
        torch.distributed.destroy_process_group()


def main() -> None:
    """Run a script under CPU compatibility: ``-m megatron_ext.megatron.cpu_compat SCRIPT ...``."""
    if len(sys.argv) < 2:
        sys.exit("usage: python -m megatron_ext.megatron.cpu_compat SCRIPT [OPTION]...")
    del sys.argv[0]
    sys.path.insert(0, os.path.dirname(os.path.abspath(sys.argv[0])))
    # Not this module, which is __main__, but the one that all other modules import.
    from megatron_ext.megatron import cpu_compat

    if cpu_compat.install():
        parser_options.without_a_gpu()
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
