"""How many threads add gradients and step on the host.

Launchers set OMP_NUM_THREADS=1, which leaves one processor to what moves tens of gigabytes an iteration. Sums and steps
go element by element, so the number of threads changes no result.
"""

import os

import torch


def use(ranks_of_node: int) -> str | None:
    """Let torch use this rank's share of the processors that it may run on, where it would use fewer. To be called
    before threads are started. Returns what was changed, in one line, or None."""
    share = max(len(os.sched_getaffinity(0)) // ranks_of_node, 1)
    share -= share // 8  # for the threads that issue, read and publish
    before = torch.get_num_threads()
    if before >= share:
        return None
    torch.set_num_threads(share)
    return f"the host adds gradients and steps with {share} threads a rank ({before} before; OMP_NUM_THREADS)"
