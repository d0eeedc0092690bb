"""How many steps are simulated, and the figure by which plans are judged."""

from collections.abc import Callable, Sequence

from megatron_ext.formats.errors import InputError
from megatron_ext.planner.states_on_drive import with_states_on_drive
from megatron_ext.schedule.user_defined_schedule import Group, Schedule
from megatron_ext.simulator.simulation import simulate
from megatron_ext.simulator.timing import Timing
from megatron_ext.workload.workload import Workload

EFFORT = {1: 400_000, 2: 400_000, 3: 300_000}
"""By zero stage: the number of steps, block uses, gathers and visits of gradients that one search may place and
simulate."""

CLOSE_ENOUGH = 5e-4
"""A plan that is this close to the proven bound, as a part of it, is not searched further (small cases: proven)."""

LEAST_CANDIDATES = 4
"""The least number of candidates that are tried, however large the workload is."""

ESTIMATED_ROUNDS = 2
"""Rounds of ``microbatch_group_size`` micro-batches in an estimate; further rounds repeat the same steps."""

SMALL_STEPS = 2048
"""With at most this many steps, several complete plans can be simulated."""


_LAST: dict[str, tuple[tuple, Schedule | InputError]] = {}


def last_found(name: str, workload: Workload, timing: Timing, find: Callable[[], Schedule]) -> Schedule:
    """The schedule that ``find`` finds for this workload on these costs. The last result of every name is kept, because
    a verdict often asks for the schedule that the planner has just found. Raises InputError as ``find`` does."""
    given = workload, timing.table, timing.extrapolate
    if name not in _LAST or _LAST[name][0] != given:
        try:
            _LAST[name] = given, find()
        except InputError as error:
            _LAST[name] = given, error
    found = _LAST[name][1]
    if isinstance(found, InputError):
        raise found
    return found


def number_of_steps(workload: Workload) -> int:
    """Steps of all pipeline ranks in one iteration."""
    return 2 * workload.parallel.pp * workload.parallel.vp * workload.parallel.num_microbatches


def shortened(workload: Workload) -> Workload:
    """The same workload with at most :data:`ESTIMATED_ROUNDS` rounds of micro-batches."""
    parallel = workload.parallel
    most = ESTIMATED_ROUNDS * parallel.microbatch_group_size
    if parallel.num_microbatches <= most or number_of_steps(workload) <= SMALL_STEPS:
        return workload
    return workload.with_microbatches(most)


RELIEF_WEIGHT = 0.01
"""Of two plans whose times differ by less than this share, the plan that relieves less memory counts as better. Each
relieved gradient is allocated, cleared and added up once more per visit, and the simulator does not count this."""


def relieved_share(groups: Sequence[Group]) -> float:
    """The share (by bytes) of groups whose gradients come and go, plus the share of groups with shards in host memory.
    At most 2."""
    relieved = sum(group.bytes for group in groups if group.gradients is not None)
    relieved += sum(group.bytes for group in groups if group.shard_rests is not None)
    return relieved / (sum(group.bytes for group in groups) or 1)


def marked(us: float, schedule: Schedule) -> float:
    """The iteration time by which plans are told apart: see :data:`RELIEF_WEIGHT`."""
    return us * (1 + RELIEF_WEIGHT * relieved_share(schedule.groups))


def visits_of_gradients(workload: Workload, groups: Sequence[Group]) -> int:
    """The number of transfers of gradients that come and go: each reduce, and for gradients in host memory also the
    copy to it and the addition. If memory is short, these are most of what is simulated."""
    visits, kinds = workload.parallel.num_microbatches, {None: 0, "sharded": 1, "host": 3}
    return sum(group.reduces(visits) * kinds[group.gradients] for group in groups)


def judged_us(workload: Workload, timing: Timing, schedule: Schedule) -> float:
    """Simulated iteration time in microseconds of a schedule that does not place optimizer states yet. As few states as
    necessary are put on the drive. Raises InputError if host memory is short."""
    return simulate(workload, timing, with_states_on_drive(schedule, workload), peaks=False).iteration_time_us


def is_small(workload: Workload) -> bool:
    """Whether the workload is small enough to simulate several complete plans."""
    return number_of_steps(workload) <= SMALL_STEPS


def is_tiny(workload: Workload) -> bool:
    """Whether there are few enough steps for a solver to look at all of them."""
    return number_of_steps(workload) <= 48
