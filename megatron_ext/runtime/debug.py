"""``MEGATRON_EXT_DEBUG=1``: check at run time what validation has proved.

Every use of every group is checked for state and version (see :func:`place_actions`). After each
iteration, the order of collectives is compared between the data-parallel ranks, and the peak of
whole parameters is compared with what the schedule promises, to the byte.
"""

import hashlib
import os

from megatron_ext.runtime.group import RankGroup, ScheduleError

VARIABLE = "MEGATRON_EXT_DEBUG"


def wanted() -> bool:
    """Whether the environment asks for the checks."""
    return os.environ.get(VARIABLE) == "1"


class IssueOrder:
    """Hashes and counts the collectives of this rank, in issue order."""

    def __init__(self):
        self._digest = hashlib.sha256()
        self._count = 0

    def add(self, group: RankGroup) -> None:
        self._digest.update(f"{group.index} {group.version}\n".encode())
        self._count += 1

    def so_far(self) -> tuple[int, str]:
        """Collectives issued and the hash of their order."""
        return self._count, self._digest.hexdigest()


class OrderedRoute:
    """A route whose collectives are counted."""

    def __init__(self, route, order: IssueOrder):
        self.route, self.order = route, order

    def issue(self, group: RankGroup):
        self.order.add(group)
        return self.route.issue(group)


class Checks:
    """What is compared when an iteration ends.

    Args:
        promised_bytes: peak of whole parameters that the schedule promises for this rank, by number of micro-batches.
        order: issue order of the gpu route's collectives.
        exchange: the collective ``exchange(object) -> list`` over the data-parallel ranks.
    """

    def __init__(self, promised_bytes: dict[int, int], order: IssueOrder, exchange):
        self.promised_bytes, self.order, self.exchange = promised_bytes, order, exchange

    def end_iteration(self, iteration: int, peak_bytes: int, num_microbatches: int) -> None:
        """Raises ScheduleError if the run differs from the schedule, or two ranks differ."""
        promised = self.promised_bytes[num_microbatches]
        everybody = self.exchange((peak_bytes, *self.order.so_far()))
        for rank, (peak, count, digest) in enumerate(everybody):
            if peak != promised:
                raise ScheduleError(
                    f"iteration {iteration}: data-parallel rank {rank} held {peak} bytes of whole parameters, but the "
                    f"schedule plans {promised}"
                )
            if (count, digest) != everybody[0][1:]:
                raise ScheduleError(
                    f"iteration {iteration}: data-parallel ranks 0 and {rank} issued their {everybody[0][1]} and "
                    f"{count} gathers in different orders"
                )
