"""The intervals in which times lie, and the settings that are equally fast as far as costs are known.

[Note: The interval]
Choices are simulated on the same drawn machines or tables (``costs.SettingCosts.drawn``). The interval of a time runs
from the least to the most of all draws. So does the interval of a ratio of two times, but it is moved
outwards by the simulator's own error, as in the verdict of ``plan`` (:mod:`megatron_ext.planner.gain_interval`). Two
choices are equal if the interval of their ratio contains 1.
"""

from math import hypot
from typing import NamedTuple

from megatron_ext.planner.fit.costs import SettingCosts
from megatron_ext.planner.fit.estimate_setting import Choice, Stock
from megatron_ext.planner.fit.setting import Setting
from megatron_ext.planner.gain_interval import MODEL_ERROR, WIDTH
from megatron_ext.planner.quick_plan import FewRounds
from megatron_ext.planner.stock import STOCK_RULES
from megatron_ext.planner.verdict import answer_of_gain
from megatron_ext.schedule.user_defined_schedule import Schedule

DRAWS, FEWEST_DRAWS = 12, 4
EFFORT = 1_500_000
"""Number of steps times layers of a stage that may be simulated for all choices together."""


class Interval(NamedTuple):
    low: float
    high: float


class Certainty:
    """Iteration times of choices on drawn costs.

    Args:
        choices: those that will be asked for. The more there are, the fewer tables are drawn.
    """

    def __init__(self, costs: SettingCosts, choices: list[Choice]):
        self.costs = costs
        layers = (max(chunk.num_layers for chunk in choice.rounds.parts[0][0].chunks) for choice in choices)
        effort = sum(choice.rounds.steps * most for choice, most in zip(choices, layers))
        self.draws = max(FEWEST_DRAWS, min(DRAWS, EFFORT // max(effort, 1)))
        self._us: dict[int, tuple[Choice, list[float]]] = {}

    def us(self, choice: Choice) -> list[float]:
        """Iteration times in microseconds, one per draw."""
        if id(choice) not in self._us:  # the choice is kept too, so that no other one gets its id
            self._us[id(choice)] = choice, self._times(choice.setting, choice.rounds, choice.schedules)
        return self._us[id(choice)][1]

    def interval(self, choice: Choice) -> Interval:
        us = [choice.us, *self.us(choice)]
        return Interval(min(us), max(us))

    def ratio(self, choice: Choice, other: Choice) -> Interval:
        """The interval of the time of ``choice`` divided by the time of ``other``."""
        return _ratio(choice.us / other.us, self.us(choice), self.us(other))

    def equal(self, choice: Choice, other: Choice) -> bool:
        ratio = self.ratio(choice, other)
        return ratio.low <= 1 <= ratio.high

    def gain_over(
        self, choice: Choice, setting: Setting, stock: Stock, rounds: FewRounds
    ) -> tuple[float, Interval, str]:
        """The gain of a choice over stock Megatron with its own setting, the gain's interval, and the answer of
        ``plan``."""
        schedules = tuple(STOCK_RULES[stock.option](part) for part, _ in rounds.parts)
        ratio = _ratio(choice.us / stock.us, self.us(choice), self._times(setting, rounds, schedules))
        gains = Interval(1 - ratio.high, 1 - ratio.low)
        return 1 - choice.us / stock.us, gains, answer_of_gain(*gains)

    def _times(self, setting: Setting, rounds: FewRounds, schedules: tuple[Schedule, ...]) -> list[float]:
        tables = self.costs.drawn(setting, rounds.parts[0][0], self.draws)
        return [rounds.times(rounds.timings(table), schedules).iteration_time_us for table in tables]


def _ratio(own: float, ours: list[float], theirs: list[float]) -> Interval:
    ratios = [own, *(one / other for one, other in zip(ours, theirs))]
    error = WIDTH * MODEL_ERROR
    return Interval(own - hypot(own - min(ratios), error), own + hypot(max(ratios) - own, error))
