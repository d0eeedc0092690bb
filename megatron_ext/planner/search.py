"""The hybrid policy: placement passes with different choices; the best are simulated, then improved locally.

The effort is counted in simulated steps and not in seconds, so the same inputs give the same plan on every machine.
"""

from collections.abc import Iterator, Sequence
from itertools import product, zip_longest
from math import inf

from megatron_ext.bounds.feasibility import pinned_need
from megatron_ext.bounds.host_room import pinned_limit
from megatron_ext.formats.errors import InputError
from megatron_ext.planner.blocks import Blocks, block_uses_of_rank
from megatron_ext.planner.placement import Choices, place_gathers
from megatron_ext.planner.search_grid import Grid, Settings
from megatron_ext.planner.search_state import EFFORT, POLISHED_STEPS, Place, Search
from megatron_ext.schedule.user_defined_schedule import Schedule
from megatron_ext.simulator.timing import Timing
from megatron_ext.workload.route import Route
from megatron_ext.workload.workload import Workload

SIMULATED = 8
"""Best settings by estimate that the simulator judges."""


POLISHED = 4
"""The best of those; their decisions are then changed one by one."""


def search(
    workload: Workload,
    timing: Timing,
    routes: tuple[Route, ...],
    bound_us: float = 0.0,
    place: Place | None = None,
    effort: float = 1.0,
    cuts: Sequence[list[list[int]]] = (),
) -> tuple[Schedule, float]:
    """The best schedule found, and its simulated iteration time.

    Args:
        place, cuts: see :class:`Search`.
        effort: part of the usual effort.

    Raises:
        InputError: no groups can be gathered within the limits and the measured sizes.
    """
    state = Search(workload, timing, routes, bound_us, place, cuts)
    state.effort = int(state.effort * effort)
    grid = Grid(state)
    grid.descend()
    if all(us == inf for us in grid.estimates.values()):
        raise grid.refused or InputError("cannot fit: no route can bring every group within the limits", field="limits")
    state.effort = max(state.effort, int(EFFORT[workload.zero_stage] * effort) // 4)
    judged = []
    own = [index for index, cut in enumerate(grid.cuts) if cut in state.cuts]
    for settings in _to_judge(grid.estimates, own):
        if judged and state.spent():
            break
        made = grid.made(settings)
        assert made is not None  # its estimate is finite
        blocks, choices = made
        judged.append((state.time_of(blocks, choices), len(judged), blocks, choices))
    for us, _, blocks, choices in sorted(judged)[: POLISHED if state.steps <= POLISHED_STEPS else 0]:
        _polish(state, blocks, choices, us)
    if state.best is None:
        assert state.refused is not None  # all that was judged
        raise state.refused
    return state.best, state.best_us


def _to_judge(estimates: dict[Settings, float], own: Sequence[int] = ()) -> list[Settings]:
    """The best settings by estimate, interleaved by set of routes: an estimate knows less of contention than
    the simulator. Of settings with the same estimate, cut, division and host copies, one. First the best of every cut
    in ``own``."""
    first = [min((us, s) for s, us in estimates.items() if s.cut == cut) for cut in own]
    always = [settings for us, settings in first if us < inf]
    by_routes: dict[int, dict[tuple, Settings]] = {}
    for us, settings in sorted((us, settings) for settings, us in estimates.items() if us < inf):
        by_routes.setdefault(settings.routes, {}).setdefault(
            (us, settings.cut, settings.divide, settings.hosts), settings
        )
    interleaved = zip_longest(
        *(found.values() for found in sorted(by_routes.values(), key=lambda found: min(found)[0]))
    )
    others = [settings for row in interleaved for settings in row if settings is not None and settings not in always]
    return always + others[: SIMULATED - len(always)]


def _polish(state: Search, blocks: Blocks, choices: Choices, us: float) -> None:
    """Change one decision at a time while the simulated iteration time falls.

    A change sends one gather by another link, stops prefetching before one use, or gives or
    takes a host copy.
    """
    improved = True
    while improved and not state.spent():  # ends: each turn lowers us and tries a new plan
        improved = False
        for other in _changes(state, blocks, choices):
            if state.spent():
                return
            found = state.time_of(blocks, other)
            if found < us * (1 - 1e-9):
                choices, us, improved = other, found, True


def _changes(state: Search, blocks: Blocks, choices: Choices) -> Iterator[Choices]:
    """Neighbours of ``choices``, one decision apart."""
    workload = state.workload
    placed = place_gathers(workload, state.timing, blocks, choices).placed
    for pp_rank, mine in enumerate(placed):
        for number, item in enumerate(mine):
            for route in choices.routes:
                if route != item.route:
                    yield choices._replace(forced={**choices.forced, (pp_rank, number): route})
    limit = pinned_limit(workload, blocks.groups)
    if limit is not None and "cpu" in choices.routes and not choices.from_host:
        for swap in product(range(len(blocks.groups)), repeat=2):
            hosted = choices.hosted ^ frozenset(swap)
            staged = choices.staged - hosted
            # Slots of ranks that stage are pinned too.
            routed = ["cpu" if g in hosted else "nvme" if g in staged else "gpu" for g in range(len(blocks.groups))]
            if ("gpu" in choices.routes or len(hosted) == len(routed)) and max(
                pinned_need(workload, blocks.groups, routed)
            ) <= limit:
                yield choices._replace(hosted=hosted, staged=staged)
    if workload.zero_stage == 3:
        for pp_rank in range(len(placed)):
            for use in range(1, len(block_uses_of_rank(workload, state.timing, blocks, pp_rank))):
                yield choices._replace(held=choices.held ^ {(pp_rank, use)})
