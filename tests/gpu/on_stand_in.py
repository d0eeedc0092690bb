"""Training on the strict stand-in of a device, where there is no GPU: what is not ordered there is said."""

import importlib
from collections.abc import Callable
from typing import TypeVar
from unittest import mock

from case_table import LAYOUTS, Training

T = TypeVar("T")

RANKS, MOST_SAID = 2, 3


def takes(case: Training) -> bool:
    """Whether the stand-in can judge a case: of up to two ranks, and not with two files on the drive, taken for one
    where a process has both (by their labels)."""
    return LAYOUTS[case.layout][0] <= RANKS and (case.route, case.states) != ("nvme", "drive")


def unavailable() -> str:
    """Why there is no stand-in here; empty where there is one."""
    try:
        importlib.import_module("strict_device")
    except ImportError as error:
        return f"the stand-in cannot be imported: {error}"
    return ""


def on_stand_in(train: Callable[[], T], seed: int) -> tuple[T, str]:
    """What ``train()`` returns, and what is found, in one line; empty where all is ordered. Collective."""
    import parity_worker  # not where there is a GPU
    import torch.distributed as dist
    from strict_cases import ORDERS, findings

    strict = {"seed": seed, "order": ORDERS[seed % len(ORDERS)]}
    with mock.patch.object(parity_worker, "train", train):
        trained, judged = parity_worker.train_strictly(strict)
    said = [""]
    if dist.get_rank() == 0:  # it has judged all ranks
        found = findings({"strict": judged})
        more = [f"{len(found) - MOST_SAID} more"] if found[MOST_SAID:] else []
        said = ["; ".join([*found[:MOST_SAID], *more])]
    dist.broadcast_object_list(said)
    return trained, said[0]
