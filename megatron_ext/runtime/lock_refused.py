"""The error text for host memory that the driver does not page-lock."""

import resource

ADVICE = "ulimit -l unlimited; in a container --ulimit memlock=-1; under Slurm PropagateResourceLimits"


def said(size_bytes: int, why: object) -> str:
    """One line: how much was asked for, what the driver says, and the limit that is the usual cause.

    Args:
        why: the error, or its code.
    """
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    known = "ulimit -l sets no limit" if limit == resource.RLIM_INFINITY else f"the limit is {limit} bytes: {ADVICE}"
    return f"{size_bytes} bytes of host memory cannot be page-locked ({why}); {known}"
