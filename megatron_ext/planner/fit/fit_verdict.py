"""Whether the fastest settings need a plan, compared with stock Megatron at the fastest settings with which it fits."""

from typing import NamedTuple

from megatron_ext.planner.fit.estimate_setting import Choice, Stock
from megatron_ext.planner.fit.found import Found
from megatron_ext.planner.fit.setting import Setting, as_words
from megatron_ext.planner.last_lines import ComparedRun, last_lines, short_of, training_by
from megatron_ext.planner.quick_plan import FewRounds
from megatron_ext.planner.verdict import HELPS, HELPS_NOT, LEAST_GAIN, Verdict, verdict


class StockRun(NamedTuple):
    """Stock Megatron, and the workload that it trains."""

    setting: Setting
    stock: Stock
    rounds: FewRounds


class FitVerdict(NamedTuple):
    """Attributes:
    conclusion: the answer and why.
    runs: the runs with a plan, with a plan of the settings as given, and without a plan.
    best: what to train: the settings, and whether by a schedule.
    given: the verdict of ``plan`` on the settings as given; None if quick rules planned them, or if they are not
        possible.
    """

    answer: str
    conclusion: str
    runs: tuple[ComparedRun, ...]
    best: tuple[Setting, bool]
    given: Verdict | None

    def lines(self, found: Found, schedule: str) -> list[str]:
        """The last lines of output. ``schedule``: path of the schedule."""
        setting, by_schedule = self.best
        add, take_out = found.launch_of(setting)
        words = [as_words(add), training_by(schedule, found.fit.winner.schedules[-1]) if by_schedule else ""]
        return last_lines(self.conclusion, self.runs, add=" ".join(filter(None, words)), take_out=" ".join(take_out))


def fastest_without(found: Found) -> StockRun | None:
    """The fastest setting with which stock Megatron fits, among those that were searched and those that are close to
    the given one, whatever ``--fix`` keeps."""
    problem = found.problem

    def fits(setting: Setting, stock: Stock) -> bool:
        room = problem.room(setting, setting.workload(problem.limits))
        return not (short_of(stock.device_bytes, room) or short_of(stock.host_bytes, problem.limits.host_bytes))

    near = [each for each in found.stock if fits(*each)]
    best = min([*found.fit.stock, *near], key=lambda each: each[1].us, default=None)
    return None if best is None else StockRun(*best, FewRounds(best[0].workload(problem.limits)))


def verdict_of_choice(found: Found, choice: Choice | None) -> Verdict | None:
    """The verdict of ``plan`` on a choice; None if quick rules planned it."""
    if choice is None or not choice.planned:
        return None
    work = choice.rounds.parts[0][0]
    return verdict(work, found.problem.costs.of(choice.setting, work), choice.schedules[0])


def verdict_of_fit(found: Found) -> FitVerdict:
    """The winner compared with stock Megatron. If nothing was searched, the answer of ``plan``."""
    winner, without, searched = found.fit.winner, fastest_without(found), found.fit.settings > 1
    given, of_given = found.given[0], verdict_of_choice(found, found.given[0])
    of_winner = None  # where the compared settings are the same, so that only the plan is judged
    if without is None or without.setting == winner.setting or not searched:
        of_winner = of_given if winner is given else verdict_of_choice(found, winner)
    answer = None if of_winner is None else of_winner.figures["answer"]
    if of_winner is not None and answer is not None and (answer == HELPS or without is not None or not searched):
        conclusion = of_winner.conclusion
    elif without is None:  # there is no other run to gain over
        answer, conclusion = HELPS, "helps to fit. Stock Megatron fits with none of the settings that were tried"
        others = not found.request.search_layout and winner.setting.parallel.world_size > 1
        conclusion += "; --search-layout tries other parallel sizes" if others else ""
    else:
        gain, (low, high), answer = found.certainty.gain_over(winner, *without)
        conclusion = f"{answer}. A plan gains {gain:.1%} ({low:.1%} to {high:.1%}) over the fastest without one"
        conclusion += " of those that were tried" if found.fit.stock_left_out else ""
    runs = [ComparedRun(f"by a plan: {found.text(winner)}", winner.us, winner.host_bytes)]
    if given is not None and given.setting != winner.setting:
        runs.append(ComparedRun("as given, by a plan", given.us, given.host_bytes))
    best = winner.setting, True
    if without is not None:
        stock = without.stock
        other = "" if without.setting == winner.setting else f": {found.text(without)}"
        runs.append(ComparedRun(stock.option + other, stock.us, stock.host_bytes))
        faster, as_fast = stock.us < winner.us, stock.us <= winner.us * (1 + LEAST_GAIN)
        if other and (faster or (as_fast and not searched)):
            how = "faster" if faster else "as fast"
            conclusion += f", and without a plan other settings are {how}: {stock.us / 1e3:.1f} ms"
        if faster or (as_fast and (answer == HELPS_NOT or (other and not searched))):
            best = without.setting, False
    return FitVerdict(answer, conclusion, tuple(runs), best, of_given)
