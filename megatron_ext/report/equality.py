"""Whether a scheduled run equals its reference to the last bit, and if not, what differs.

[Note: The reference]
Time is compared with Megatron as shipped. Equality cannot be compared with it: another bucket layout adds
the same gradients up in another order, so last bits differ without any fault. The reference is
therefore Megatron's own gather at the schedule's bucket layout.
"""

from typing import NamedTuple

from megatron_ext.formats.metrics import Metrics

REFERENCE = "Megatron's own gather at the schedule's bucket layout"


class Equality(NamedTuple):
    """``bitwise``: True, False, or None if there was no reference to compare with.

    ``differences``: one line for each figure that differs. A line names the first iteration
    (counted from 1) or the ranks.
    """

    bitwise: bool | None
    differences: tuple[str, ...]

    @property
    def text(self) -> str:
        """The outcome as one sentence."""
        if self.bitwise is None:
            return "equality not checked: there are no metrics of both this run and a reference run"
        if self.bitwise:
            return f"losses, gradient norms and parameters are bitwise those of the reference, {REFERENCE}"
        return f"NOT equal to the reference, {REFERENCE}: " + "; ".join(self.differences)


def compare_metrics(reference: Metrics | None, scheduled: Metrics | None) -> Equality:
    """Compare losses, gradient norms, evaluation losses and parameter hashes bit by bit."""
    if reference is None or scheduled is None:
        return Equality(None, ())
    differences = []
    for name, what in (("loss", "loss"), ("grad_norm", "gradient norm"), ("eval_loss", "evaluation loss")):
        where = "evaluation" if name == "eval_loss" else "iteration"
        both = (getattr(run, name) for run in (reference, scheduled))
        differences += _first_difference(what, where, *both, numbers_only="loss" in name)
    differences += _different_hashes(reference.parameter_sha256, scheduled.parameter_sha256)
    return Equality(not differences, tuple(differences))


def largest_loss_difference(stock: Metrics | None, scheduled: Metrics | None) -> float | None:
    """The largest relative difference over iterations in which both losses are numbers; None if there is none."""
    if stock is None or scheduled is None:
        return None
    both = [(a, b) for a, b in zip(stock.loss, scheduled.loss) if a is not None and b is not None]
    return max((abs(b - a) / (abs(a) or 1.0) for a, b in both), default=None)


def _first_difference(what: str, where: str, theirs, ours, *, numbers_only: bool) -> list[str]:
    """A line about the first entry that differs. With ``numbers_only`` None equals nothing, because
    two values that are not numbers need not have the same bits."""
    if len(theirs) != len(ours):
        return [f"{what}: {len(ours)} entries, the reference has {len(theirs)}"]
    both = enumerate(zip(theirs, ours))
    differing = [index for index, (a, b) in both if _said(a) != _said(b) or (numbers_only and a is None)]
    if not differing:
        return []
    index = differing[0]
    more = f", and {len(differing) - 1} more" if len(differing) > 1 else ""
    return [f"{what} at {where} {index + 1} is {_said(ours[index])}, the reference has {_said(theirs[index])}{more}"]


def _said(value: float | None) -> str:
    """The value as text, which is another one for other bits."""
    return "not a number" if value is None else repr(value)


def _different_hashes(theirs, ours) -> list[str]:
    if len(theirs) != len(ours):
        return [f"parameters: {len(ours)} ranks, the reference has {len(theirs)}"]
    ranks = [str(rank) for rank, (a, b) in enumerate(zip(theirs, ours)) if a != b]
    return [f"parameters after the last iteration on rank {', '.join(ranks)}"] if ranks else []
