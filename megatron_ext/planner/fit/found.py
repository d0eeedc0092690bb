"""What ``fit`` found for a request: settings, the options that set them, commands. The verdict: ``fit_verdict.py``."""

import shlex
from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

import msgspec

from megatron_ext.formats.errors import flag
from megatron_ext.megatron.gpt_arguments import UNEVEN
from megatron_ext.planner.fit.certainty import Certainty
from megatron_ext.planner.fit.estimate_setting import Choice, Stock, stock_of
from megatron_ext.planner.fit.request import FitProblem, Request, with_changes
from megatron_ext.planner.fit.search_settings import Fit
from megatron_ext.planner.fit.setting import COUNT_ENDS, OTHER_NAMES, Setting, as_words, changes
from megatron_ext.planner.quick_plan import FewRounds
from megatron_ext.workload.workload import Limits

MOST_EQUAL = 4
OURS = ("--zero-stage", "--data-parallel-size")
"""Options of a setting that a launch script does not have."""
NEEDED = ("--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather")


class Found(NamedTuple):
    """An answer with the request and the certainty of the answer.

    Attributes:
        stock: stock Megatron with the given layout and batch, whether it fits or not.
        given_stock: stock Megatron with the settings as given; None if they do not fit or if it does not have them.
    """

    request: Request
    problem: FitProblem
    fit: Fit
    certainty: Certainty
    stock: list[tuple[Setting, Stock]]
    given_stock: Stock | None

    @property
    def limits(self) -> Limits:
        """The limits of a plan of the winner."""
        winner = self.fit.winner
        room = self.problem.room(winner.setting, winner.rounds.parts[0][0])
        return msgspec.structs.replace(self.problem.limits, device_bytes=room)

    @property
    def given(self) -> tuple[Choice | None, str]:
        """The settings as given; or None, and why they are not possible."""
        refused = self.problem.refused
        return (None, refused) if refused else (self.fit.given, self.fit.refused)

    def launch_of(self, setting: Setting) -> tuple[dict[str, str], list[str]]:
        """Options to add to the launch script for a setting, and options to take out of it."""
        given, chosen = self.problem.space.given.options(), setting.options()
        for name in (*OURS, *self.problem.changed):
            given.pop(name, None)
        add, take_out = changes(given, {name: value for name, value in chosen.items() if name not in OURS})
        there = {word.partition("=")[0] for word in self.request.words}
        take_out += [other for name, other in OTHER_NAMES.items() if name in (*add, *take_out)]
        if setting.shape.stage_layers != self.problem.space.given.shape.stage_layers:
            add |= dict.fromkeys(COUNT_ENDS, "") if setting.counts_ends else {}
            take_out += [name for name in map(flag, UNEVEN) if name not in add]
        add = {name: value for name, value in (add | dict.fromkeys(NEEDED, "")).items() if value or name not in there}
        return add, [name for name in take_out if name in there]

    def words(self, unknown: bool = False) -> tuple[str, ...]:
        """The script's arguments with the winner's options, without those of :meth:`ours`, and without those that were
        ignored because no list names them, unless ``unknown``."""
        add, take_out = self.launch_of(self.fit.winner.setting)
        take_out += [*self.ours(), *([] if unknown else self.problem.passed_over)]
        return with_changes(self.request.words, add, take_out)

    def text(self, choice) -> str:
        """A text for the setting of a choice or of stock Megatron. Parallel sizes are included if they are searched."""
        return choice.setting.text(self.request.search_layout)

    def ours(self) -> dict[str, str]:
        """Options of ``describe`` and ``prepare`` for the winner that a launch script does not have."""
        setting, limits = self.fit.winner.setting, self.limits
        known = {"--limit-device-bytes": limits.device_bytes, "--limit-host-bytes": limits.host_bytes}
        known["--gpus-per-node"] = setting.parallel.gpus_per_node
        ours = {name: setting.options()[name] for name in OURS}
        return ours | {name: str(value) for name, value in known.items() if value is not None}

    def commands(self) -> list[str]:
        """Shell commands that plan the winner."""
        batch, ours = self.fit.winner.setting.batch, self.ours()
        words = self.words()
        estimate = (
            f"megatron-ext cost estimate --hardware {self.request.hardware} --workload workload.json --out "
            f"cost_table.json -- {shlex.join(words)}"
        )
        tables = dict(zip(self.problem.costs.tables, self.request.cost_tables))
        table = "cost_table.json" if self.request.hardware else tables[batch.micro_batch_size]
        return [
            f"megatron-ext describe --out workload.json {as_words(ours)} -- {shlex.join(words)}",
            *([estimate] if self.request.hardware else []),
            f"megatron-ext plan --cost-table {table} --workload workload.json --out schedule.json",
        ]


def judge(request: Request, problem: FitProblem, fit: Fit) -> Found:
    """Draw costs for all choices that are shown, and collect the answer."""
    shown = [*fit.frontier, *fit.tried[:MOST_EQUAL], *([fit.given] if fit.given is not None else [])]
    given, stock = fit.given, None
    if given is not None and given.setting.zero_stage == 1:
        table = problem.costs.of(given.setting, given.rounds.parts[0][0])
        stock = stock_of(given.rounds, given.rounds.timings(table))
    return Found(request, problem, fit, Certainty(problem.costs, shown), list(_stock(problem)), stock)


def _stock(problem: FitProblem) -> Iterator[tuple[Setting, Stock]]:
    """Stock Megatron for the given layout and batch at zero stage 1: with and without recompute, and with the optimizer
    on the host and on the device."""
    given, batch = problem.space.given, problem.space.given.batch
    places = [False, True] if given.shape.dtype != "float32" else [False]
    for recompute, on_host in product((None, "full"), places):
        optimizer = given.optimizer.placed(on_host)
        recomputed = batch._replace(recompute=recompute, recompute_method="uniform", recompute_num_layers=1)
        setting = given._replace(zero_stage=1, batch=recomputed, optimizer=optimizer)
        if problem.costs.allows(setting):
            rounds = FewRounds(setting.workload(problem.limits))
            yield setting, stock_of(rounds, rounds.timings(problem.costs.of(setting, rounds.parts[0][0])))
