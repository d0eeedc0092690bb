"""The metrics file of one training run: what it computed, and how long each iteration took."""

import msgspec

from megatron_ext.formats import json_files
from megatron_ext.formats.errors import InputError
from megatron_ext.formats.rank_memory import RankMemory


class Metrics(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Lists have one entry per iteration, unless said otherwise.

    ``loss`` is None if it was not a number. ``grad_norm`` is None if the optimizer skipped the step.
    ``iteration_us`` is the largest over ranks, from a barrier to the end of the optimizer step. ``eval_loss`` has one
    entry per evaluation. ``peak_bytes`` is the most bytes of whole parameters of each global rank; empty without a
    schedule. ``census`` is what each global rank held in the iteration in which its device held most.
    ``cuda_peak_bytes`` is ``torch.cuda.max_memory_allocated`` of each global rank. ``parameter_sha256`` has one entry
    per global rank, after the last iteration. ``turn_iterations``: iterations per turn, if the run took turns with
    another one; None if it ran alone. ``host_limit_bytes``: the limit of host memory or address space that the system
    sets for the run; None without such a limit.
    """

    loss: tuple[float | None, ...]
    grad_norm: tuple[float | None, ...]
    iteration_us: tuple[float, ...]
    eval_loss: tuple[float | None, ...] = ()
    peak_bytes: tuple[int, ...] = ()
    census: tuple[RankMemory, ...] = ()
    cuda_peak_bytes: tuple[int, ...] = ()
    parameter_sha256: tuple[str, ...]
    turn_iterations: int | None = None
    host_limit_bytes: int | None = None

    @property
    def iterations(self) -> int:
        """Iterations that were trained."""
        return len(self.loss)


def load(path) -> Metrics:
    """Read the metrics that a training run wrote.

    Raises:
        InputError: the file does not have this form, holds no iteration, or its lists differ in length.
    """
    metrics = json_files.load(path, Metrics)
    if not metrics.loss:
        raise InputError("holds no iteration", file=path, field="loss", value=[])
    for name in ("grad_norm", "iteration_us"):
        entries = getattr(metrics, name)
        if len(entries) != metrics.iterations:
            raise InputError(f"has {len(entries)} entries for {metrics.iterations} iterations", file=path, field=name)
    for index, us in enumerate(metrics.iteration_us):
        if us <= 0:
            raise InputError("must be above 0", file=path, field=f"iteration_us[{index}]", value=us)
    if not metrics.parameter_sha256:
        raise InputError("holds no rank", file=path, field="parameter_sha256", value=[])
    return metrics
