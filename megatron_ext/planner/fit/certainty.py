"""In which interval times lie, and which settings are equal as far as costs are known.

[Note: The interval]
Choices are simulated on the same drawn machines or tables (:meth:`megatron_ext.planner.fit.costs.Costs.drawn`). A time
lies between the least and the most of all draws. A ratio of two times does, too, moved outwards by the simulator's own
error as the verdict of ``plan`` is (:mod:`megatron_ext.planner.gain_interval`). Two choices are equal where the
interval of their ratio holds 1.
"""

from math import hypot
from typing import NamedTuple

from megatron_ext.planner.fit.costs import Costs
from megatron_ext.planner.fit.estimate_setting import Choice, Stock
from megatron_ext.planner.fit.setting import Setting
from megatron_ext.planner.gain_interval import MODEL_ERROR, WIDTH
from megatron_ext.planner.quick_plan import FewRounds
from megatron_ext.planner.stock import STOCK_RULES
from megatron_ext.planner.verdict import answer_of
from megatron_ext.schedule.user_defined_schedule import Schedule

DRAWS, FEWEST_DRAWS = 12, 4
EFFORT = 1_500_000
"""Steps times layers of a stage that may be simulated for all choices together."""


class Interval(NamedTuple):
    low: float
    high: float


class Certainty:
    """Times of choices on drawn costs.

    Args:
        count: choices that will be asked for, which decides how many draws there are.
    """

    def __init__(self, costs: Costs, choices: list[Choice]):
        self.costs = costs
        layers = (max(chunk.num_layers for chunk in choice.rounds.parts[0][0].chunks) for choice in choices)
        effort = sum(choice.rounds.steps * most for choice, most in zip(choices, layers))
        self.draws = max(FEWEST_DRAWS, min(DRAWS, EFFORT // max(effort, 1)))
        self._us: dict[int, list[float]] = {}

    def us(self, choice: Choice) -> list[float]:
        """Iteration times, one a draw."""
        if id(choice) not in self._us:
            self._us[id(choice)] = self._times(choice.setting, choice.rounds, choice.schedules)
        return self._us[id(choice)]

    def interval(self, choice: Choice) -> Interval:
        us = [choice.us, *self.us(choice)]
        return Interval(min(us), max(us))

    def ratio(self, choice: Choice, other: Choice) -> Interval:
        """Of the time of ``choice`` to that of ``other``."""
        return _ratio(choice.us / other.us, self.us(choice), self.us(other))

    def equal(self, choice: Choice, other: Choice) -> bool:
        ratio = self.ratio(choice, other)
        return ratio.low <= 1 <= ratio.high

    def gain_over(
        self, choice: Choice, setting: Setting, stock: Stock, rounds: FewRounds
    ) -> tuple[float, Interval, str]:
        """Of a choice over stock Megatron by its own setting: the gain, its interval and the answer of ``plan``."""
        schedules = tuple(STOCK_RULES[stock.option](part) for part, _ in rounds.parts)
        ratio = _ratio(choice.us / stock.us, self.us(choice), self._times(setting, rounds, schedules))
        gains = Interval(1 - ratio.high, 1 - ratio.low)
        return 1 - choice.us / stock.us, gains, answer_of(*gains)

    def _times(self, setting: Setting, rounds: FewRounds, schedules: tuple[Schedule, ...]) -> list[float]:
        tables = self.costs.drawn(setting, rounds.parts[0][0], self.draws)
        return [rounds.times(rounds.timings(table), schedules).iteration_time_us for table in tables]


def _ratio(own: float, ours: list[float], theirs: list[float]) -> Interval:
    ratios = [own, *(one / other for one, other in zip(ours, theirs))]
    error = WIDTH * MODEL_ERROR
    return Interval(own - hypot(own - min(ratios), error), own + hypot(max(ratios) - own, error))
