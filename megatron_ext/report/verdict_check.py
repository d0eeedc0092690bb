"""Whether a measured ratio of iteration times bears a verdict out."""

from megatron_ext.planner.verdict import CANNOT_TELL, HELPS, LEAST_GAIN

RIGHT, WRONG, UNDECIDED = "right", "wrong", "not decided by this measurement"
ERRORS = 2.0
"""Standard errors on either side of a measured ratio."""


def check_verdict(answer: str | None, ratio: float, standard_error: float) -> str | None:
    """What a measured ratio (schedule to stock) says of ``answer``; None where the plan gave none or could not tell.

    ``helps`` claims a gain, ``does not help`` claims one of less than 1 %. The claim is right or wrong if the whole
    interval of the measurement lies on one side.
    """
    if answer is None or answer == CANNOT_TELL:
        return None
    low, high = 1 - ratio - ERRORS * standard_error, 1 - ratio + ERRORS * standard_error
    if answer == HELPS:
        return RIGHT if low > 0 else WRONG if high < 0 else UNDECIDED
    return RIGHT if high < LEAST_GAIN else WRONG if low > LEAST_GAIN else UNDECIDED
