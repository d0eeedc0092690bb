"""How many ranks of a run share this node, as the launcher says it."""

import os
import re

from megatron_ext.formats.errors import InputError


def forget_single_task() -> None:
    """Forget the launcher's variables if there is one task and torchrun has not started it. Container images and
    Kubernetes set them for a job of one task, too (enroot's hook for PyTorch, PyTorchJob); nobody has started ranks."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    if os.environ.get("WORLD_SIZE") == "1" and "MASTER_ADDR" in os.environ and "TORCHELASTIC_RUN_ID" not in os.environ:
        for name in names:
            os.environ.pop(name, None)


OTHERS = ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "LOCAL_SIZE")
"""The number of ranks of a node, as Open MPI, MPICH or Intel MPI, and DeepSpeed's launcher say it."""


def ranks_on_this_node() -> int | None:
    """Read from torchrun's ``LOCAL_WORLD_SIZE``, or if another launcher starts the ranks, from :data:`OTHERS` or
    ``SLURM_STEP_TASKS_PER_NODE`` (such as ``8(x2)``). None if no launcher says it.

    Raises:
        InputError: srun has started different numbers of ranks on its nodes.
    """
    if "LOCAL_WORLD_SIZE" in os.environ:
        return int(os.environ["LOCAL_WORLD_SIZE"])
    names = (*OTHERS, "SLURM_STEP_TASKS_PER_NODE") if "RANK" in os.environ else ()
    text = next((os.environ[name] for name in names if name in os.environ), None)
    if text is None:
        return None
    counts = {int(count) for count in re.findall(r"(\d+)(?:\(x\d+\))?(?:,|$)", text)}
    if len(counts) != 1:
        said = "every node must have the same number of ranks: use srun --ntasks-per-node"
        raise InputError(said, field="SLURM_STEP_TASKS_PER_NODE", value=text)
    return counts.pop()
