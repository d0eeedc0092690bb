"""What comes and goes with the steps of a rank: whole parameters, whole gradients and activations."""

from collections import Counter
from collections.abc import Iterator
from functools import lru_cache
from itertools import accumulate
from operator import itemgetter
from typing import NamedTuple

from msgspec.structs import replace

from megatron_ext.schedule.group_facts import gradient_bytes, uses_of_groups
from megatron_ext.schedule.user_defined_schedule import Schedule, Unshard
from megatron_ext.workload.step_order import steps_of_ranks
from megatron_ext.workload.workload import Chunk, Limits, Workload


class Moment(NamedTuple):
    """Bytes by kind at the moment of a step at which their sum is largest."""

    step: str
    whole: int
    activations: int
    gradients: int

    @property
    def total(self) -> int:
        return self.whole + self.activations + self.gradients


def moments(schedule: Schedule, workload: Workload, pp_rank: int) -> Iterator[Moment]:
    """For every step, in order, the moment at which the rank holds the most bytes."""
    groups, rank = schedule.groups, schedule.ranks[pp_rank]
    freed = schedule.zero_stage == 3
    gradients = _Gradients(schedule, workload, pp_rank)
    whole = sum(groups[a.group].bytes for a in rank.start.unshard)
    if not freed:
        whole = sum(group.bytes for group in groups if group.pp_rank == pp_rank)
    for entry, (chunk, backward, by_layer) in zip(rank.steps, activations(workload, pp_rank)):
        if not (backward and gradients.come_and_go) and not (freed and (entry.unshard or entry.reshard)):
            yield Moment(entry.step, whole, max(by_layer), gradients.bytes)  # nothing else changes within the step
            continue
        best = Moment(entry.step, 0, 0, 0)
        come, go = Counter[int](), Counter[int]()
        for action in (*entry.unshard, *entry.reshard) if freed else ():
            (come if isinstance(action, Unshard) else go)[max(action.at, -1)] += groups[action.group].bytes
        whole += come[-1]
        if backward:
            gradients.begin(chunk)
        for layer, saved in reversed(list(enumerate(by_layer))) if backward else enumerate(by_layer):
            whole += come[layer]
            if backward:
                gradients.before(chunk, layer)
            if whole + saved + gradients.bytes > best.total:
                best = Moment(entry.step, whole, saved, gradients.bytes)
            if backward:
                gradients.behind(chunk, layer)
            whole -= go[layer]
        whole -= go[-1]
        yield best


def activation_peaks(workload: Workload) -> list[int]:
    """The most bytes of activations that each pipeline rank holds. They do not depend on the schedule."""
    return list(_activation_peaks(replace(workload, limits=Limits())))  # a search tries many limits


@lru_cache(maxsize=4)
def _activation_peaks(workload: Workload) -> tuple[int, ...]:
    return tuple(max(max(saved) for *_, saved in fullest_steps(workload, rank)) for rank in range(workload.parallel.pp))


def activations(workload: Workload, pp_rank: int) -> Iterator[tuple[int, bool, list[int]]]:
    """For each step of a pipeline rank: its chunk, whether it is a backward, and by layer the bytes of activations that
    the rank holds while the layer computes."""
    for chunk, backward, in_flight, sums in _in_flight(workload, pp_rank):
        yield chunk, backward, [in_flight + size for size in sums]


def fullest_steps(workload: Workload, pp_rank: int) -> Iterator[tuple[int, bool, list[int]]]:
    """The steps of :func:`activations` with the most bytes: for each chunk one forward and one backward."""
    most = {step[:2]: step[2:] for step in sorted(_in_flight(workload, pp_rank), key=itemgetter(2))}
    return ((*step, [in_flight + size for size in sums]) for step, (in_flight, sums) in most.items())


def _in_flight(workload: Workload, pp_rank: int) -> Iterator[tuple[int, bool, int, list[int]]]:
    """For each step: its chunk, whether it is a backward, the bytes of other micro-batches, and by layer the bytes of
    its own micro-batch."""
    sums = [_sums_of(chunk) for chunk in workload.chunks_of_rank(pp_rank)]
    in_flight = 0  # saved by micro-batches that have done their forward and not begun their backward
    for step in steps_of_ranks(workload.parallel)[pp_rank]:
        chunk, backward = step.model_chunk_id(workload.parallel.pp), step.kind == "B"
        own = sums[chunk][0][-1]
        in_flight -= own if backward else 0
        yield chunk, backward, in_flight, sums[chunk][backward]
        in_flight += 0 if backward else own


class _Gradients:
    """The whole gradients of one rank that come and go within the iteration. ``bytes``: of those allocated now."""

    def __init__(self, schedule: Schedule, workload: Workload, pp_rank: int):
        self.bytes = 0
        self._on_its_way: tuple[int, int] | None = None  # group and bytes
        self._visits = [0] * schedule.parallel.vp
        self._last = schedule.parallel.num_microbatches
        spans = uses_of_groups(schedule.groups, workload) if any(g.gradients for g in schedule.groups) else []
        self._allocated: dict[tuple[int, int], list[tuple[int, int, int, bool]]] = {}
        self._reduced: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
        for index, (group, (first, last)) in enumerate(zip(schedule.groups, spans)):
            if group.pp_rank == pp_rank and group.gradients is not None:
                item = index, gradient_bytes(group, workload), group.reduce_every
                self._allocated.setdefault((group.model_chunk_id, last), []).append((*item, group.alone))
                self._reduced.setdefault((group.model_chunk_id, first), []).append(item)
        self.come_and_go = bool(self._allocated)

    def begin(self, chunk: int) -> None:
        """A backward step of ``chunk`` begins."""
        self._visits[chunk] += 1

    def before(self, chunk: int, layer: int) -> None:
        """Allocate the whole gradients that the backward of ``layer`` is the first to add to."""
        for index, size, every, alone in self._allocated.get((chunk, layer), ()):
            if (self._visits[chunk] - 1) % every == 0:
                if alone or (self._on_its_way is not None and self._on_its_way[0] == index):
                    self._settle()  # alone: any reduce; else only the group's own from the visit before
                self.bytes += size

    def behind(self, chunk: int, layer: int) -> None:
        """Issue the reduces that are due after the backward of ``layer``. The previous reduce has ended, and its whole
        gradient is freed."""
        visit = self._visits[chunk]
        for index, size, every in self._reduced.get((chunk, layer), ()):
            if visit % every == 0 or visit == self._last:
                self._settle()
                self._on_its_way = index, size

    def _settle(self) -> None:
        if self._on_its_way is not None:
            self.bytes -= self._on_its_way[1]
            self._on_its_way = None


def _sums_of(chunk: Chunk) -> tuple[list[int], list[int]]:
    """By layer, for one micro-batch: the bytes saved up to and including the layer, and the same plus the bytes that
    the layer's backward recomputes.

    Megatron recomputes only within its transformer block. The tensors that the output layer saves are freed before the
    block's backward recomputes anything.
    """
    saved = list(accumulate(chunk.activation_bytes or (0,) * chunk.num_layers))
    kinds = chunk.layer_kinds or ("transformer",) * len(saved)
    recomputed = (0 if kind in ("embedding", "output") else chunk.recompute_bytes for kind in kinds)
    return saved, [own + anew for own, anew in zip(saved, recomputed, strict=True)]
