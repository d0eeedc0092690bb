"""One plan on its way through the passes."""

from collections.abc import Iterable
from typing import NamedTuple

from msgspec.structs import replace

from megatron_ext.schedule.user_defined_schedule import Schedule
from megatron_ext.simulator.simulation import simulate
from megatron_ext.simulator.timing import Timing
from megatron_ext.workload.workload import Workload


class Decision(NamedTuple):
    """What a pass decided, for which groups (by number; None: for all), and the figures that it decided by."""

    step: str
    text: str
    groups: frozenset[int] | None = None


class Candidate(NamedTuple):
    """A set of choices for one plan, with what was decided and why. A pass never changes a candidate: it makes new
    candidates.

    Attributes:
        workload: the workload, with the limits that the plan keeps.
        schedule: the schedule, with everything that is decided so far.
        us: simulated iteration time of the schedule in microseconds; None if it is not known.
        why: the decisions so far, in the order of the passes.
    """

    workload: Workload
    timing: Timing
    schedule: Schedule
    us: float | None = None
    why: tuple[Decision, ...] = ()

    def decided(self, step: str, text: str, of: Iterable[int] | None = None, /, **changes) -> "Candidate":
        """A new candidate: this one after a decision of the pass ``step``. ``text`` says what was decided, ``of`` for
        which groups, and ``changes`` are the fields of the schedule that change."""
        why = (*self.why, Decision(step, text, None if of is None else frozenset(of)))
        if not changes:
            return self._replace(why=why)
        return self._replace(schedule=replace(self.schedule, **changes), us=None, why=why)

    def simulated_us(self) -> float:
        """The simulated iteration time of the schedule in microseconds. It is simulated if it is not known yet."""
        return simulate(self.workload, self.timing, self.schedule).iteration_time_us if self.us is None else self.us
