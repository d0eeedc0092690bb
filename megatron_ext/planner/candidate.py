"""One plan on its way through the passes."""

from collections.abc import Iterable
from typing import NamedTuple

from msgspec.structs import replace

from megatron_ext.schedule.user_defined_schedule import Schedule
from megatron_ext.simulator.simulation import run
from megatron_ext.simulator.timing import Timing
from megatron_ext.workload.workload import Workload


class Decision(NamedTuple):
    """What a pass decided, of which groups (by number; None: of all), and the figures that decided."""

    step: str
    text: str
    groups: frozenset[int] | None = None


class Candidate(NamedTuple):
    """A set of choices for one plan, with what was decided and why. A pass never changes one: it makes others.

    Attributes:
        workload: with the limits that the plan keeps.
        schedule: all that is decided so far.
        us: its simulated iteration time; None where that is not known.
        why: the decisions so far, in the order of the passes.
    """

    workload: Workload
    timing: Timing
    schedule: Schedule
    us: float | None = None
    why: tuple[Decision, ...] = ()

    def decided(self, step: str, text: str, of: Iterable[int] | None = None, /, **changes) -> "Candidate":
        """This candidate after a decision of the pass ``step``, which changes these fields of the schedule; ``of``:
        the groups that it is about."""
        why = (*self.why, Decision(step, text, None if of is None else frozenset(of)))
        if not changes:
            return self._replace(why=why)
        return self._replace(schedule=replace(self.schedule, **changes), us=None, why=why)

    def simulated_us(self) -> float:
        """The iteration time of the schedule as it is."""
        return run(self.workload, self.timing, self.schedule).iteration_time_us if self.us is None else self.us
