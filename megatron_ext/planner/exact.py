"""The exact policy: small cases solved to proven optimality by CP-SAT.

For each way to cut and divide the blocks that the hybrid policy knows, one model decides the route, the use at which a
gather is issued, the order on every link, publishing, and what stays whole between uses. CP-SAT (Google OR-tools;
Perron and Didier) proves the optimum.

[Note: What is proven]
The model leaves out staging slots, and effects that only make a schedule slower: links and compute that disturb each
other, and messages that queue on one edge. So its optimum is a lower bound for every schedule that has these groups and
issues and frees them where blocks begin and end. The schedule is read from the model, timed by the simulator like any
other schedule, and compared with that bound. Without contention the two times agree. Otherwise ``options.proven_gap``
says how far apart they are.
"""

from itertools import product
from typing import NamedTuple

from msgspec.structs import replace
from ortools.sat.python import cp_model

from megatron_ext.bounds.reduce_bounds import least_tail_us
from megatron_ext.formats.errors import InputError
from megatron_ext.planner.assemble import assemble
from megatron_ext.planner.blocks import Blocks, block_uses_of_rank
from megatron_ext.planner.decisions import Gap, RankGaps
from megatron_ext.planner.effort import judged_us
from megatron_ext.planner.gather_search import GatherSearch, GridPoint, Grouping
from megatron_ext.planner.problem import Problem
from megatron_ext.schedule.footprint import pinned_need
from megatron_ext.schedule.group_facts import uses_of_groups
from megatron_ext.schedule.user_defined_schedule import PlanOptions, Schedule
from megatron_ext.simulator.thread_path import least_thread_us
from megatron_ext.simulator.timing import Timing
from megatron_ext.workload.route import Copy, Route, kind_of
from megatron_ext.workload.step_order import steps_of_ranks
from megatron_ext.workload.workload import Workload, optimizer_bytes

UNITS = 2_000_000
"""Number of whole units of time in the longest schedule that is considered."""


class Effort(NamedTuple):
    """How much to spend: at most ``choices`` of issue places in one model, ``work`` on one model (CP-SAT's own measure,
    which is deterministic, unlike seconds), and at most ``models`` in total."""

    choices: int
    work: float
    models: int


EXACT = Effort(choices=20_000, work=1.5, models=6)
"""For the exact policy."""

SMALL = Effort(choices=1000, work=0.3, models=5)
"""For the hybrid policy, which also solves small cases exactly."""

BETWEEN = Effort(choices=1000, work=0.1, models=8)
"""For the hybrid policy if memory is short, between two passes that change decisions one by one."""


def exact_schedule(problem: Problem, known: Schedule, known_us: float) -> Schedule:
    """The best schedule found. Its ``options.proven_gap`` says how far it is above the proven bound for its groups.

    ``known`` is the hybrid policy's schedule, to start from.

    Raises:
        InputError: no grouping fits the limits, each has too many choices, or a needed size was not measured.
    """
    best, best_us, lowest = solve(problem, known, known_us, EXACT)
    if lowest is None:
        said = f"every grouping exceeds the limits, has more than {EXACT.choices} choices of when to gather, or has"
        raise InputError(f"{said} a group of a size that was not measured; use hybrid", field="policy", value="exact")
    proven_us = max(lowest, problem.bound_us, least_thread_us(problem.workload, problem.timing))
    options = PlanOptions(proven_gap=round(best_us / proven_us - 1, 6))
    return replace(best, metadata=replace(best.metadata, planner="exact", options=options))


def solve(problem: Problem, known: Schedule, known_us: float, effort: Effort) -> tuple[Schedule, float, float | None]:
    """The best of ``known`` and the optima of all groupings that are small enough.

    Returns:
        The schedule, its simulated iteration time, and the lowest proven bound of the groupings that were solved. The
        bound is None if no grouping could be solved.
    """
    workload, timing = problem.workload, problem.timing
    best, best_us, lowest, models = known, known_us, None, 0
    # The groups of the known schedule come first: there the search can start from that schedule.
    for made in sorted(_groupings(problem), key=lambda made: made.blocks.groups != known.groups):
        if models == effort.models or not _small(workload, timing, made.blocks, effort.choices):
            continue
        try:
            schedule, bound = solve_groups(workload, timing, made, known, known_us, effort.work)
        except InputError:  # the size of a group was not measured
            continue
        models += 1
        lowest = bound if lowest is None else min(lowest, bound)
        if schedule is not None:
            us = judged_us(workload, timing, schedule)
            if us < best_us * (1 - 1e-9):
                best, best_us = schedule, us
    return best, best_us, lowest


def _groupings(problem: Problem) -> list[Grouping]:
    """Every way to cut and divide the blocks that fits the workload's limits."""
    every = GatherSearch(problem)
    made = (
        every.made(GridPoint(cut, divide, len(every.horizons) - 1, 0))
        for divide, cut in product(range(len(every.divides)), range(len(every.cuts)))
    )
    return [one for one in made if one is not None]


def _small(workload: Workload, timing: Timing, blocks: Blocks, choices: int) -> bool:
    """Whether a model of these blocks has at most ``choices`` choices of issue places."""
    total, pp = 0, workload.parallel.pp
    for rank in range(pp):
        groups = sum(len(blocks.blocks[block].groups) for ids in blocks.of_stage[rank::pp] for block in ids)
        total += groups * len(block_uses_of_rank(workload, timing, blocks, rank))
    return total <= choices


def solve_groups(
    workload: Workload, timing: Timing, given: Grouping, known: Schedule, known_us: float, work: float
) -> tuple[Schedule | None, float]:
    """The optimum for these groups: a schedule (None if the known schedule is no worse) and a lower bound."""
    model = _ScheduleModel(workload, timing, given, known_us)
    if known.groups == given.blocks.groups:
        model.start_from(known)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = 0
    solver.parameters.max_deterministic_time = work
    status = solver.solve(model.model)
    if status == cp_model.INFEASIBLE:  # no schedule is faster than the known one
        return None, known_us
    bound = solver.best_objective_bound * model.unit
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return None, bound
    return model.schedule(solver), bound


class _ScheduleModel:
    """Variables of one CP-SAT model; times are whole units of ``unit`` microseconds."""

    def __init__(self, workload: Workload, timing: Timing, given: Grouping, known_us: float):
        self.workload, self.timing, (self.blocks, self.choices) = workload, timing, given
        blocks = self.blocks
        self.unit = known_us / UNITS
        self.horizon = UNITS + 1000  # slower schedules than the known one are not considered
        self.model = cp_model.CpModel()
        parallel = workload.parallel
        self.steps = steps_of_ranks(parallel)
        self.ranks = [RankGaps(workload, timing, blocks, rank) for rank in range(parallel.pp)]
        self.block_uses = [rank.uses for rank in self.ranks]
        counts = [len(uses) for uses in self.block_uses]
        self.reach = [[self._time(f"r{rank}.{n}") for n in range(most + 1)] for rank, most in enumerate(counts)]
        self.begin = [[self._time(f"b{rank}.{n}") for n in range(most)] for rank, most in enumerate(counts)]
        self.issue: dict[Gap, dict[int, cp_model.IntVar]] = {}
        self.keep: dict[Gap, cp_model.IntVar | None] = {}
        self.by: dict[Gap, dict[Route, cp_model.IntVar]] = {}
        self.starts: dict[Gap, cp_model.IntVar] = {}
        self._pipeline()
        self._gathers()
        self._memory_limit()
        makespan = self._time("makespan")
        for rank in range(parallel.pp):  # reduces overlap with the last backward, but one reduce must follow it
            after = self._units(least_tail_us(workload, timing, rank))
            self.model.add(makespan >= self.reach[rank][-1] + after)
        optimizer_us = max(timing.optimizer_us(optimizer_bytes(workload, rank)) for rank in range(parallel.pp))
        self.model.minimize(makespan + self._units(optimizer_us))

    def _time(self, name: str):
        return self.model.new_int_var(0, self.horizon, name)

    def _units(self, us: float) -> int:
        """``us`` in whole units, rounded down so that the optimum stays a lower bound."""
        return int(us / self.unit)

    def _pipeline(self) -> None:
        """Constrain the uses to their order, and inputs to come before the steps that need them."""
        model, parallel = self.model, self.workload.parallel
        ends = {}
        for rank, steps in enumerate(self.steps):
            for number, block_use in enumerate(self.block_uses[rank]):
                model.add(self.begin[rank][number] >= self.reach[rank][number])
                end = self.begin[rank][number] + self._units(block_use.us)
                model.add(self.reach[rank][number + 1] >= end)
                ends[rank, steps[block_use.step]] = end
        final = parallel.pp * parallel.vp - 1
        for rank, steps in enumerate(self.steps):
            for number, block_use in enumerate(self.block_uses[rank]):
                if number and self.block_uses[rank][number - 1].step == block_use.step:
                    continue
                step = steps[block_use.step]
                source = step.stage - 1 if step.kind == "F" else step.stage + 1
                if 0 <= source <= final:
                    sender = source % parallel.pp
                    hop = self._units(self.timing.p2p_us) if sender != rank else 0
                    model.add(self.reach[rank][number] >= ends[sender, step._replace(stage=source)] + hop)

    def _gathers(self) -> None:
        model, groups = self.model, self.blocks.groups
        spans = uses_of_groups(groups, self.workload)
        lanes: dict[tuple[int, str], list] = {}
        published: dict[int, tuple[cp_model.LinearExprT, cp_model.IntVar]] = {}
        for number, gap in [pair for rank in self.ranks for pair in enumerate(rank.gaps)]:
            name = f"{gap.rank}.{gap.group}.{gap.use}"
            # A group of several blocks stays whole within a step.
            places = () if number in self.ranks[gap.rank].fixed else range(gap.first, gap.use + 1)
            issue = {place: model.new_bool_var(f"i{name}.{place}") for place in places}
            kept = model.new_bool_var(f"k{name}") if gap.after >= 0 else None
            model.add_exactly_one([*issue.values(), *([kept] if kept is not None else [])])
            start, lead = self._time(f"s{name}"), self._lead(gap, *spans[gap.group])
            for place, chosen in issue.items():
                if place >= 0:
                    model.add(start >= self.reach[gap.rank][place]).only_enforce_if(chosen)
            by: dict[Route, cp_model.IntVar] = {}
            group = groups[gap.group]
            own = self.timing.among(group.ranks)
            for route in self.choices.routes:
                if kind_of(route).staged:
                    continue
                us = self._units(own.unshard_us(route, group.bytes, group.algorithm))
                chosen = by[route] = model.new_bool_var(f"{route}{name}")
                lanes.setdefault((gap.rank, route), []).append(
                    model.new_optional_fixed_size_interval_var(start, us, chosen, f"l{route}{name}")
                )
                model.add(self.begin[gap.rank][gap.use] + lead >= start + us).only_enforce_if(chosen)
                if (copy := kind_of(route).copy) is not None:
                    model.add(start >= self._published(gap, copy, published, lanes, chosen)).only_enforce_if(chosen)
            model.add(sum(by.values()) == (1 if kept is None else 1 - kept))
            self.issue[gap], self.keep[gap], self.by[gap], self.starts[gap] = issue, kept, by, start
        for intervals in lanes.values():
            model.add_no_overlap(intervals)
        self._host_memory({group: pair[1] for group, pair in published.items()})

    def _lead(self, gap: Gap, first: int, last: int) -> int:
        """Units for which the block computes before one of its layers uses the group, rounded up. A run waits at that
        layer, not at the beginning of the block."""
        block_use = self.block_uses[gap.rank][gap.use]
        block = self.blocks.blocks[block_use.block]
        times = self.timing.layers[gap.rank][block.model_chunk_id]
        backward = self.steps[gap.rank][block_use.step].kind == "B"
        before = times.backward[last + 1 : block.last + 1] if backward else times.forward[block.first : first]
        return self._units(sum(before)) + 1 if before else 0

    def _host_memory(self, hosted: dict[int, cp_model.IntVar]) -> None:
        """Constrain the host copies of every node to its pinned memory."""
        limit = self.workload.limits.pinned_host_bytes
        if limit is None:
            return
        groups = self.blocks.groups
        needs = {g: pinned_need(self.workload, [groups[g]], {0}) for g in hosted}
        for node in range(self.workload.parallel.num_nodes):
            self.model.add(sum(needs[g][node] * there for g, there in hosted.items()) <= limit)

    def _published(self, gap: Gap, copy: Copy, published, lanes, chosen):
        """End of the group's publishing, which occupies the publish link if the group has to be published."""
        if gap.group not in published:
            group = self.blocks.groups[gap.group]
            us = self._units(self.timing.among(group.ranks).publish_us(gap.rank, (copy,), group.bytes))
            start = self._time(f"p{gap.group}")
            there = self.model.new_bool_var(f"P{gap.group}")
            lanes.setdefault((gap.rank, "publish"), []).append(
                self.model.new_optional_fixed_size_interval_var(start, us, there, f"lp{gap.group}")
            )
            published[gap.group] = (start + us, there)
        end, there = published[gap.group]
        self.model.add_implication(chosen, there)
        return end

    def _memory_limit(self) -> None:
        limit = self.workload.streamed_bytes
        if limit is None:
            return
        for rank in self.ranks:
            whole_at: list[list] = [[] for _ in range(len(rank.uses) + 1)]  # index 0 is the start
            for gap, size in zip(rank.gaps, rank.sizes):
                for place in range(gap.first, gap.use + 1):
                    whole = [chosen for issue, chosen in self.issue[gap].items() if issue <= place]
                    kept = self.keep[gap]
                    whole_at[place + 1].append(size * sum(whole if kept is None else [*whole, kept]))
            for terms in filter(None, whole_at):
                self.model.add(sum(terms) <= limit)

    def start_from(self, known: Schedule) -> None:
        """Let the search start from a schedule of the same groups: its routes, its issue places and the groups that it
        keeps."""
        for pp_rank, rank in enumerate(self.ranks):
            now = rank.decisions_of(known, pp_rank)
            for number, gap in enumerate(rank.gaps):
                gathered, kept = number not in now.kept, self.keep[gap]
                if kept is not None:
                    self.model.add_hint(kept, not gathered)
                for place, chosen in self.issue[gap].items():
                    self.model.add_hint(chosen, gathered and place == now.earliest[number])
                for route, chosen in self.by[gap].items():
                    self.model.add_hint(chosen, gathered and route == now.routes[number])

    def schedule(self, solver) -> Schedule:
        """The schedule of the solution. Every gather is issued at the last use that is reached before the gather
        starts."""
        placed, freed = [], []
        for rank in self.ranks:
            found = []
            for number, gap in enumerate(rank.gaps):
                if self.keep[gap] is not None and solver.value(self.keep[gap]):
                    continue
                start = solver.value(self.starts[gap])
                place = next(place for place, chosen in self.issue[gap].items() if solver.value(chosen))
                # ends: each turn raises place
                while place < gap.use and solver.value(self.reach[gap.rank][place + 1]) <= start:
                    place += 1
                route: Route = next(route for route, chosen in self.by[gap].items() if solver.value(chosen))
                found.append((place, start, rank.gather(number, place, route), number))
            freed.append(rank.freed((number for *_, number in found), self.workload.zero_stage == 3))
            placed.append([gather for *_, gather, _ in sorted(found)])
        return assemble(self.workload, self.blocks.groups, placed, freed, planner="exact")
