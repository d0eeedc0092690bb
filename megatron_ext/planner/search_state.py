"""What a search of the hybrid policy has tried: effort, the best schedule so far, and how candidates are judged."""

from collections.abc import Callable, Sequence
from math import inf

from megatron_ext.formats.errors import InputError
from megatron_ext.planner.assemble import assemble
from megatron_ext.planner.blocks import Blocks
from megatron_ext.planner.placement import Choices, Plan, place_gathers
from megatron_ext.schedule.state_placement import with_states_on_drive
from megatron_ext.schedule.user_defined_schedule import Group, Schedule
from megatron_ext.simulator.simulation import run
from megatron_ext.simulator.timing import Timing
from megatron_ext.workload.route import Route
from megatron_ext.workload.workload import Workload

EFFORT = {1: 400_000, 2: 400_000, 3: 1_200_000}
"""By zero stage: steps, block uses, gathers and visits of gradients that one search may place and simulate."""

CLOSE_ENOUGH = 5e-4
"""A plan this near to the proven bound, relatively, is not searched further (small cases: proven)."""

LEAST_CANDIDATES = 4
"""Candidates that are tried at least, however large the workload."""


ESTIMATED_ROUNDS = 2
"""Rounds of ``microbatch_group_size`` micro-batches in an estimate; further rounds repeat the same steps."""


POLISHED_STEPS = 2048
"""With more steps than this one decision is too small a part of the whole to be worth a simulation."""


def number_of_steps(workload: Workload) -> int:
    """Steps of all pipeline ranks in one iteration."""
    return 2 * workload.parallel.pp * workload.parallel.vp * workload.parallel.num_microbatches


def shortened(workload: Workload) -> Workload:
    """The same workload with at most :data:`ESTIMATED_ROUNDS` rounds of micro-batches."""
    parallel = workload.parallel
    most = ESTIMATED_ROUNDS * parallel.microbatch_group_size
    if parallel.num_microbatches <= most or number_of_steps(workload) <= POLISHED_STEPS:
        return workload
    return workload.with_microbatches(most)


Place = Callable[[tuple[Group, ...]], tuple[Group, ...] | None]
"""Decides for groups where their shards rest and how their gradients are kept; None where memory is short."""


RELIEF_WEIGHT = 0.01
"""Of two plans within this share, the one that relieves less counts as better: each relieved gradient is allocated,
cleared and added up once more a visit, which the simulator does not count."""


def relieved_share(groups: Sequence[Group]) -> float:
    """By bytes, the share of groups whose gradients come and go, and that of shards in host memory; 2 at most."""
    relieved = sum(g.bytes * ((g.gradients is not None) + (g.shard_rests is not None)) for g in groups)
    return relieved / (sum(group.bytes for group in groups) or 1)


class Search:
    """Tries choices, keeps the best schedule by simulated iteration time.

    Args:
        place: of the groups of every candidate; by default everything stays on the device.
        cuts: ways to cut beside :func:`cuttings`; the best settings of each are simulated, whatever their estimates.
    """

    def __init__(
        self,
        workload: Workload,
        timing: Timing,
        routes: tuple[Route, ...],
        bound_us: float,
        place: Place | None = None,
        cuts: Sequence[list[list[int]]] = (),
    ):
        self.workload, self.timing, self.routes, self.bound_us = workload, timing, routes, bound_us
        self.place, self.cuts = place, cuts
        self.steps = number_of_steps(workload)
        self.effort = EFFORT[workload.zero_stage]
        self.tried = 0
        self.best_us = self.best_mark = inf
        self.best: Schedule | None = None
        self.refused: InputError | None = None
        self.times: dict[tuple, float] = {}
        """Of a tiny workload, by groups and gathers: different choices often give the same."""

    def spent(self) -> bool:
        near = self.best_us <= self.bound_us * (1 + (1e-9 if is_tiny(self.workload) else CLOSE_ENOUGH))
        return near or (self.effort <= 0 and self.tried >= LEAST_CANDIDATES)

    def schedule(self, blocks: Blocks, choices: Choices) -> Schedule:
        return self._schedule(blocks, place_gathers(self.workload, self.timing, blocks, choices))

    def _schedule(self, blocks: Blocks, plan: Plan) -> Schedule:
        schedule = assemble(self.workload, blocks.groups, plan.placed, plan.freed, planner="hybrid")
        return with_states_on_drive(schedule, self.workload)

    def judge(self, schedule: Schedule) -> float:
        """Simulated iteration time; counts against the effort."""
        unshards = sum(len(r.start.unshard) + sum(len(e.unshard) for e in r.steps) for r in schedule.ranks)
        self._count(unshards + visits_of_gradients(schedule))
        return run(self.workload, self.timing, schedule, peaks=False).iteration_time_us

    def _count(self, transfers: int) -> None:
        self.tried += 1
        self.effort -= self.steps + 4 * transfers

    def time_of(self, blocks: Blocks, choices: Choices) -> float:
        """Simulated iteration time with these choices; the best schedule so far is kept. Infinite where a node's host
        memory is short."""
        self.effort -= self.steps  # the placement pass
        gathers = ()
        try:
            plan = place_gathers(self.workload, self.timing, blocks, choices)
            if is_tiny(self.workload):
                gathers = (blocks.groups, *map(tuple, plan.placed), *map(tuple, plan.freed))
                if gathers in self.times:
                    self._count(sum(map(len, plan.placed)))
                    return self.times[gathers]
            schedule = self._schedule(blocks, plan)
        except InputError as error:
            self.refused = error
            return inf
        us = self.judge(schedule)
        if gathers:
            self.times[gathers] = us
        mark = us * (1 + RELIEF_WEIGHT * relieved_share(schedule.groups))
        if mark < self.best_mark * (1 - 1e-9):
            self.best_mark, self.best_us, self.best = mark, us, schedule
        return us


def visits_of_gradients(schedule: Schedule) -> int:
    """Transfers of gradients that come and go: each reduce, and in host memory the copy there and the addition. Where
    memory is short they are most of what is simulated."""
    backwards = schedule.parallel.num_microbatches
    return sum(
        -(-backwards // group.reduce_every) * (3 if group.gradients == "host" else 1)
        for group in schedule.groups
        if group.gradients is not None
    )


def is_tiny(workload: Workload) -> bool:
    """Few enough steps that a solver may look at all of them."""
    return number_of_steps(workload) <= 48
