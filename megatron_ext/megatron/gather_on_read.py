"""Uses of parameters between two iterations: either all replicas gather together, or none does."""

import itertools
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist

from megatron_ext.megatron.run_summary import say
from megatron_ext.runtime.group import ScheduleError
from megatron_ext.runtime.param_reads import ParamReads

PEERS_SECONDS = 60
"""How many seconds a rank that uses parameters waits until its replicas use them too. All replicas come from the same
optimizer step, which is a collective. Only checkpoints take them further apart than this, and checkpoints gather by
themselves."""

RUNS = itertools.count()
"""Numbers the runs of this process, equally on all ranks, so that runs have different keys in the store."""


class GatherOnRead(ParamReads):
    """Gathers all parameters before their first use between two iterations, on all data-parallel ranks at once.

    A rank that gathered alone would wait for ever, or its gathers would be matched with other gathers of its replicas.
    So ranks tell each other through the store that they use parameters. If a replica does not, the run ends with an
    error that says so.

    Args:
        storages: the storages of whole parameters, as :class:`ParamReads` takes them.
        gather: ``gather(used)`` makes all parameters of this rank whole and fresh, or with ``missing`` those in the
            storages ``used``; collective over ``ranks``.
        ranks: global ranks of the data-parallel group.
        seconds: how long to wait for the other ranks of the group.
        missing: as :class:`ParamReads` takes it.
    """

    def __init__(self, storages, gather: Callable, ranks: list[int], seconds: float = PEERS_SECONDS, missing=None):
        super().__init__(storages, self._gather_together, missing)
        self._gather_used, self._ranks, self._seconds = gather, ranks, seconds
        self._keys, self._said = f"megatron_ext/reads/{next(RUNS)}", missing is not None  # then said at start
        self._last: str | None = None
        self._gathered = 0

    def until_forced(self, start_param_sync: Callable) -> Callable:
        """Wrap Megatron's ``start_param_sync`` of the last chunk. Its own uses of parameters are not noticed, and after
        a forced call all parameters are whole."""

        def sync(*args, force_sync: bool = False, **how) -> None:
            with self.suspended():
                start_param_sync(*args, force_sync=force_sync, **how)
            if force_sync:
                self.close()

        return sync

    def _gather_together(self, place: str, used: set[int]) -> None:
        self._wait_for_replicas(place)
        self._gather_used(used)
        if not self._said and dist.get_rank() == 0:
            self._said = True
            say(
                f"{place} uses parameters between the optimizer's step and the next forward: each time all of them are "
                "gathered, outside the schedule"
            )

    def _wait_for_replicas(self, place: str) -> None:
        ranks = self._ranks
        if len(ranks) == 1:
            return
        try:
            store = dist.distributed_c10d._get_default_store()
        except AttributeError:  # this release gives no access to the store: assume that replicas do the same
            return
        self._gathered += 1
        key, last = f"{self._keys}/{ranks[0]}/{self.count}/{self._gathered}", self._last
        if store.add(key, 1) == len(ranks):
            store.set(f"{key}/all", "")
            for old in (last, f"{last}/all") if last else ():  # all ranks have passed it
                store.delete_key(old)
        self._last = key
        try:
            store.wait([f"{key}/all"], timedelta(seconds=self._seconds))
        except RuntimeError as error:
            raise ScheduleError(
                f"{place} uses parameters between the optimizer's step and the next forward on rank {dist.get_rank()}, "
                f"but not all of its data-parallel ranks {ranks} do so within {self._seconds:g} seconds, and all must "
                "gather: use parameters on all ranks, or call megatron_ext.megatron.hooks.unshard_all() on all ranks"
            ) from error
