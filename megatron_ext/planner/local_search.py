"""Small cases with little memory: simulated annealing (Kirkpatrick, Gelatt and Vecchi, Science 1983) changes decisions
one by one, for several ways to make groups.

A placement pass keeps the groups that are used next (Belady 1966) and prefetches by one horizon. If layers are unequal
and memory is tight, the best schedule does neither at every place.
"""

import contextlib
import random
from functools import lru_cache, partial
from itertools import product
from math import exp, inf

from megatron_ext.formats.errors import InputError
from megatron_ext.planner.assemble import Freed, Placed, assemble
from megatron_ext.planner.decisions import Decisions, RankGaps
from megatron_ext.planner.gather_search import GatherSearch, GridPoint, Grouping
from megatron_ext.planner.passes.cut_groups import halves
from megatron_ext.planner.passes.place_gathers import place_gathers
from megatron_ext.planner.problem import Problem
from megatron_ext.schedule.footprint import pinned_host_bytes
from megatron_ext.schedule.user_defined_schedule import Schedule
from megatron_ext.schedule.validate import validate
from megatron_ext.simulator.simulation import simulate
from megatron_ext.simulator.timing import Timing
from megatron_ext.workload.route import Route, kind_of
from megatron_ext.workload.workload import Workload

CHANGES = 160
"""Number of changes that are simulated per gap, over all groupings."""

MOST_CHANGES = 5000
"""The largest number of changes that are simulated. They take some seconds."""

GROUPINGS, FINALISTS = 10, 3
"""Groupings that share the first half of the changes; the best of these, which get the second half."""

EXCHANGES = 0.15
"""Share of the changes that exchange host copies, if pinned memory is limited."""

HOTTEST, COLDEST = 3e-3, 2e-4
"""Temperatures at the beginning and at the end, as parts of the iteration time."""

EXPOSED = 1e-3
"""Weight of exposed time relative to iteration time. It decides between schedules with the same iteration time."""


def improve(problem: Problem, known: Schedule, known_us: float) -> tuple[Schedule, float]:
    """A schedule that is no slower than ``known``, and its simulated iteration time.

    Args:
        known, known_us: a schedule without staging slots, and its simulated iteration time. A schedule that reaches the
            bound is not improved.
    """
    found = [
        Annealing(*problem[:2], made, known if made.blocks.groups == known.groups else None)
        for made in groupings(problem, known)
    ]
    found = [one for one in found if one.us < inf]
    for part, number in ((0.5 / GROUPINGS, GROUPINGS), (0.5 / FINALISTS, FINALISTS)):
        found = sorted(found, key=lambda one: one.best_us)[:number]
        for one in found:
            if known_us > problem.bound_us * (1 + 1e-9):
                one.run(int(min(CHANGES * one.number_of_gaps, MOST_CHANGES) * part))
    for one in found:
        if one.best is not None and one.best_us < known_us * (1 - 1e-9):
            with contextlib.suppress(InputError):  # the schedule is not valid: changes keep memory and order only
                known, known_us = validate(one.best), one.best_us
    return known, known_us


def groupings(problem: Problem, known: Schedule) -> list[Grouping]:
    """The groups of ``known``, and the best other groupings by estimate. Of groupings with the same groups only one is
    kept."""
    every = GatherSearch(problem)
    every.divides += [partial(halves, divide) for divide in every.divides]  # each group cut into two
    best: dict[tuple, tuple[float, GridPoint]] = {}
    cuts, divides, horizons, _, hosts = map(range, every.sizes)
    for cut, divide, horizon, order in product(cuts, divides, horizons, hosts):
        point = GridPoint(cut, divide, horizon, 0, order)
        us, made = every.estimate(point), every.made(point)
        if us < inf and made is not None:
            own = made.blocks.groups
            if own == known.groups:
                us = 0.0  # the known grouping comes first
            best[own] = min(best.get(own, (inf, point)), (us, point))
    made = (every.made(point) for _, point in sorted(best.values())[:GROUPINGS])
    return [grouping for grouping in made if grouping is not None]


class Annealing:
    """Simulated annealing of one grouping: its present decisions and the best schedule so far."""

    def __init__(self, workload: Workload, timing: Timing, given: Grouping, known: Schedule | None = None):
        self.workload, self.timing, (self.blocks, self.choices) = workload, timing, given
        blocks = self.blocks
        self.ranks = [RankGaps(workload, timing, blocks, rank) for rank in range(workload.parallel.pp)]
        self.placed = [lru_cache(maxsize=8)(rank.placed) for rank in self.ranks]  # one rank changes at a time
        self.number_of_gaps = sum(len(rank.gaps) for rank in self.ranks)
        self.random = random.Random(0)
        if known is None:
            plan = place_gathers(workload, timing, *given)
            known = assemble(workload, blocks.groups, plan.placed, plan.freed, planner="hybrid")
        as_it_is = [rank.decisions_of(known, number) for number, rank in enumerate(self.ranks)]
        early = [one._replace(earliest=rank.first) for one, rank in zip(as_it_is, self.ranks)]
        self.best: Schedule | None = None
        self.best_us = inf
        self.costs: dict[tuple, float] = {}
        """By gathers, because different decisions often lead to the same gathers."""
        self.us, self.now = min(((self.cost(one), one) for one in (as_it_is, early)), key=lambda item: item[0])

    def cost(self, decisions: list[Decisions]) -> float:
        """Simulated iteration time plus a small part of the exposed time; infinite if a limit is exceeded."""
        made = [placed(one) for placed, one in zip(self.placed, decisions)]
        placed, freed = [one[0] for one in made if one], [one[1] for one in made if one]
        if len(placed) < len(made):
            return inf
        gathers = (*map(tuple, placed), *map(tuple, freed))
        if gathers not in self.costs:
            self.costs[gathers] = self._simulated(placed, freed)
        return self.costs[gathers]

    def _simulated(self, placed: list[list[Placed]], freed: list[list[Freed]]) -> float:
        schedule = assemble(self.workload, self.blocks.groups, placed, freed, planner="hybrid")
        limit = self.workload.limits.pinned_host_bytes
        if limit is not None and max(pinned_host_bytes(schedule), default=0) > limit:
            return inf
        result = simulate(self.workload, self.timing, schedule, peaks=False)
        if result.iteration_time_us < self.best_us:
            self.best, self.best_us = schedule, result.iteration_time_us
        return result.iteration_time_us + EXPOSED * sum(result.exposed_us) / len(result.exposed_us)

    def run(self, changes: int) -> None:
        """Simulate ``changes`` changes while the temperature falls. At most ten times as many are tried."""
        done, base = 0, self.best_us
        for _ in range(10 * changes):
            if done == changes:
                break
            number = self.random.randrange(len(self.ranks))
            if self.workload.limits.pinned_host_bytes is not None and self.random.random() < EXCHANGES:
                decisions = self._exchanged()
            else:
                rank, changed = self.ranks[number], None
                if rank.gaps:
                    kinds = self._stay, self._reroute, self._reorder, self._delay
                    changed = self.random.choices(kinds, (8, 5, 5, 4))[0](rank, self.now[number])
                decisions = [*self.now[:number], changed or self.now[number], *self.now[number + 1 :]]
            if decisions == self.now:
                continue
            us = self.cost(decisions)
            if us == inf:
                continue
            temperature = base * HOTTEST * (COLDEST / HOTTEST) ** (done / changes)
            done += 1
            if us <= self.us or self.random.random() < exp((self.us - us) / temperature):
                self.us, self.now = us, decisions

    def _exchanged(self) -> list[Decisions]:
        """One group gives its host copy up to another group, which may belong to another rank. All gathers of both
        change their route."""
        decisions = list(self.now)
        hosted, others = [], []
        for number, rank in enumerate(self.ranks):
            order, routes = set(decisions[number].order), decisions[number].routes
            for group, gaps in rank.of_group.items():
                there = any(gap in order and not kind_of(routes[gap]).gathers for gap in gaps)
                (hosted if there else others).append((number, gaps, self._routes(group)))
        for found, gathers in ((hosted, True), (others, False)):
            number, gaps, possible = self.random.choice(found or [(0, [], [])])
            route = next((route for route in possible if kind_of(route).gathers == gathers), None)
            if route is not None:
                routes = [route if gap in gaps else old for gap, old in enumerate(decisions[number].routes)]
                decisions[number] = decisions[number]._replace(routes=tuple(routes))
        return decisions

    # Neighbours of decisions, drawn at random; None if the draw gave no neighbour.

    def _routes(self, group: int) -> list[Route]:
        choices = self.choices
        return [route for route in choices.routes if not kind_of(route).gathers or choices.may_take(route, group)]

    def _some_of_group(self, rank: RankGaps) -> list[int]:
        """One gap, or several consecutive gaps of the same group."""
        number = self.random.randrange(len(rank.gaps))
        mine = rank.of_group[rank.gaps[number].group]
        first = mine.index(number)
        count = 1 if self.random.random() < 0.6 else self.random.randint(1, len(mine) - first)
        return mine[first : first + count]

    def _stay(self, rank: RankGaps, decisions: Decisions) -> Decisions | None:
        """Keep a group whole over some gaps, or gather it there. If it stays whole, other groups make room for it."""
        mine = [n for n in self._some_of_group(rank) if rank.gaps[n].after >= 0 and n not in rank.fixed]
        if not mine:
            return None
        kept = decisions.kept
        if mine[0] in kept:
            return self._gathered(rank, decisions, [number for number in mine if number in kept])
        kept = kept | set(mine)
        given_up: list[int] = []
        while max(whole := rank.whole_bytes(kept)) > rank.limit:  # ends: each turn takes one from kept or returns
            over = next(use for use, size in enumerate(whole) if size > rank.limit) - 1
            free, gaps = kept - rank.fixed - set(mine), rank.gaps
            others = [number for number in free if gaps[number].after < over < gaps[number].use]
            if not others:
                return None
            given_up.append(self.random.choice(sorted(others)))
            kept = kept - {given_up[-1]}
        order = tuple(number for number in decisions.order if number not in kept)
        return self._gathered(rank, decisions._replace(kept=kept, order=order), given_up)

    def _gathered(self, rank: RankGaps, decisions: Decisions, numbers: list[int]) -> Decisions:
        """The decisions with gathers in these gaps, in the order of their uses, or at random a little earlier in that
        order."""
        order, routes, earliest = list(decisions.order), list(decisions.routes), list(decisions.earliest)
        for number in numbers:
            before = [n for n, other in enumerate(order) if rank.gaps[other].use < rank.gaps[number].use]
            place = before[-1] + 1 if before else 0
            order.insert(max(0, place - self.random.choice((0, 0, 0, 1, 2))), number)
            routes[number] = self.random.choice(self._routes(rank.gaps[number].group))
            earliest[number] = rank.first[number]
        return Decisions(decisions.kept - set(numbers), tuple(order), tuple(routes), tuple(earliest))

    def _reroute(self, rank: RankGaps, decisions: Decisions) -> Decisions | None:
        """Send some gathers of a group by another route. If host memory is short, another group gives up its copy."""
        mine = [number for number in self._some_of_group(rank) if number not in decisions.kept]
        if not mine:
            return None
        routes: list[Route] = list(decisions.routes)
        group = rank.gaps[mine[0]].group
        others: list[Route] = [route for route in self._routes(group) if route != routes[mine[0]]]
        if not others:
            return None
        chosen: Route = self.random.choice(others)
        short = self.workload.limits.pinned_host_bytes is not None
        for number in rank.of_group[group] if short and self.random.random() < 0.7 else mine:
            routes[number] = chosen
        hosted = {rank.gaps[n].group for n in decisions.order if not kind_of(routes[n]).gathers} - {group}
        if short and not kind_of(chosen).gathers and hosted and self.random.random() < 0.7:
            other = self.random.choice(sorted(hosted))
            gathers = [route for route in self._routes(other) if kind_of(route).gathers]
            for number in rank.of_group[other] if gathers else ():
                routes[number] = gathers[0]
        return decisions._replace(routes=tuple(routes))

    def _reorder(self, rank: RankGaps, decisions: Decisions) -> Decisions | None:
        """Issue a gather a few places earlier or later."""
        order = list(decisions.order)
        if len(order) < 2:
            return None
        place = self.random.randrange(len(order))
        number = order.pop(place)
        order.insert(min(max(place + self.random.choice((-6, -3, -2, -1, -1, 1, 1, 2, 3, 6)), 0), len(order)), number)
        earliest = list(decisions.earliest)
        if self.random.random() < 0.5:
            earliest[number] = rank.first[number]
        return decisions._replace(order=tuple(order), earliest=tuple(earliest))

    def _delay(self, rank: RankGaps, decisions: Decisions) -> Decisions | None:
        """Issue a gather not before some use, or as early as possible."""
        if not decisions.order:
            return None
        number = self.random.choice(decisions.order)
        earliest, first = list(decisions.earliest), rank.first[number]
        anew = earliest[number] > first and self.random.random() < 0.6
        earliest[number] = first if anew else self.random.randint(first, rank.gaps[number].use)
        return decisions._replace(earliest=tuple(earliest))
