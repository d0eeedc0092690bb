"""``--user-defined-schedule-check FILE``: does training by the schedule equal Megatron's own gather, to the last bit?

The first run with a FILE that does not exist is the reference: Megatron gathers, at the schedule's bucket layout, and
the results are written to FILE. The same command again trains by the schedule and is compared with FILE when it ends.
The gradient norms of all iterations and all parameters of every rank at the end are compared. As a control, a further
run with MEGATRON_EXT_STOCK_GATHER=1 makes the reference again and compares it with FILE. If they differ, this training
is not reproducible, with or without a schedule.
A run that ends earlier than its options say (because of a signal, a time limit, or a result that Megatron's rerun
machinery could not reproduce) writes no reference and is not compared.
"""

import hashlib
from pathlib import Path
from typing import Literal

import msgspec
import torch

from megatron_ext.formats import json_files
from megatron_ext.formats.errors import InputError
from megatron_ext.megatron.run_summary import LAYOUT_NOTE, RunTimes

LEAVE_OUT = ("iterations_to_skip", "phase_transition_iterations")
"""Options with which Megatron does not train every iteration."""


class ReferenceRun(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The results of training with Megatron's own gather.

    Attributes:
        schedule_sha256: the sha256 of the schedule file whose bucket layout was used.
        grad_norms: by iteration, as ``float.hex`` writes them; empty text if the step was skipped.
        parameter_sha256: the sha256 of all parameters, by rank.
        measured: times of the run; None if it was too short.
    """

    kind: Literal["reference_run"]
    schedule_sha256: str
    grad_norms: tuple[str, ...]
    parameter_sha256: tuple[str, ...]
    measured: RunTimes | None


class EqualityCheck:
    """The check of one run.

    Args:
        path: FILE.
        schedule_sha256: the sha256 of this run's schedule file.

    Attributes:
        iterations: how many iterations the run is to train; None if that is not known.

    Raises:
        InputError: FILE is of another schedule or cannot be read; or it does not exist and cannot be written.
    """

    def __init__(self, path, schedule_sha256: str):
        self.path, self.schedule_sha256 = Path(path), schedule_sha256
        self.reference: ReferenceRun | None = None
        self.grad_norms: list[str] = []
        self.iterations: int | None = None
        if self.path.exists():
            self.reference = json_files.load(path, ReferenceRun)
            if self.reference.schedule_sha256 != schedule_sha256:
                why, theirs = "was made with another schedule; remove it to make a new reference", self.reference
                raise InputError(why, file=path, field="schedule_sha256", value=theirs.schedule_sha256[:12])
        else:
            json_files.check_writable(path)

    @property
    def is_reference(self) -> bool:
        """Whether this run makes the reference."""
        return self.reference is None

    def start_lines(self) -> list[str]:
        """Lines that say whether this run is the reference, and if so, how a run without a schedule differs from it."""
        if self.reference is None:
            return [f"equality check: this run is the reference and writes {self.path}", LAYOUT_NOTE]
        return [f"equality check: this run is compared with {self.path} when training ends"]

    def note(self, result: tuple) -> None:
        """Record the gradient norm from the ``result`` of an optimizer step."""
        norm = result[1]
        self.grad_norms.append("" if norm is None else float(norm).hex())

    def finish(self, digests: list[str], measured: RunTimes | None) -> list[str]:
        """On the first rank: write the reference, or compare with it, and return lines that say so.

        Raises:
            InputError: the run differs from its reference.
        """
        if self.iterations is not None and len(self.grad_norms) < self.iterations:
            what = "writes no" if self.reference is None else "is not compared with"
            ended = f"this run ended after {len(self.grad_norms)} of {self.iterations} iterations"
            return [f"equality check: {ended} and {what} {self.path}; give the same command again"]
        mine = ReferenceRun(
            kind="reference_run",
            schedule_sha256=self.schedule_sha256,
            grad_norms=tuple(self.grad_norms),
            parameter_sha256=tuple(digests),
            measured=measured,
        )
        if self.reference is None:
            json_files.save(self.path, mine)
            return [f"this was the reference, written to {self.path}; the same command again trains by the schedule"]
        difference = _difference(self.reference, mine)
        if difference is not None:
            raise InputError(difference, file=self.path)
        return [
            f"equal to the reference in {self.path} to the last bit: gradient norms of {len(mine.grad_norms)} "
            f"iterations, parameters of {len(digests)} ranks"
        ]


def iterations_ahead(args) -> int | None:
    """How many iterations a run is to train, from Megatron's validated arguments; None if they do not say, or if some
    iterations are skipped."""
    begun, last = getattr(args, "iteration", None) or 0, getattr(args, "train_iters", None)
    if not last or any(getattr(args, name, None) for name in LEAVE_OUT):
        return None
    interval = getattr(args, "exit_interval", None) or last
    return min(last, (begun // interval + 1) * interval) - begun


def _difference(reference: ReferenceRun, mine: ReferenceRun) -> str | None:
    """The first difference, in one line; None if the runs are equal."""
    for field, what in (("grad_norms", "trained {} iterations"), ("parameter_sha256", "had {} ranks")):
        theirs, ours = (len(getattr(run, field)) for run in (reference, mine))
        if theirs != ours:
            return f"cannot be compared: the reference {what.format(theirs)}, this run {ours}"
    for iteration, (theirs, ours) in enumerate(zip(reference.grad_norms, mine.grad_norms), 1):
        if theirs != ours:
            return (
                f"NOT EQUAL: gradient norm of iteration {iteration}: reference {float.fromhex(theirs or 'nan')!r}, "
                f"this run {float.fromhex(ours or 'nan')!r}"
            )
    for rank, (theirs, ours) in enumerate(zip(reference.parameter_sha256, mine.parameter_sha256)):
        if theirs != ours:
            return f"NOT EQUAL: parameters of rank {rank}"
    return None


def parameter_digest(ddps: list[torch.nn.Module]) -> str:
    """sha256 over all parameters of this rank's chunks, which are whole, or become whole as they are iterated over."""
    digest = hashlib.sha256()
    for ddp in ddps:
        for name, parameter in ddp.named_parameters():
            digest.update(name.encode())
            copied = parameter.detach().to("cpu", copy=True)  # memory shared with a NumPy array cannot be freed
            digest.update(copied.contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
