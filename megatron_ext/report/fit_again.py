"""Searches the frontier of ``fit`` again with the costs that a run has measured: is another choice better now?"""

from typing import NamedTuple

from megatron_ext.cost.cost_table import CostTable
from megatron_ext.formats import json_files
from megatron_ext.planner.fit.found import Found, judge
from megatron_ext.planner.fit.request import Request, fit_problem_of
from megatron_ext.report.calibrate import calibrate
from megatron_ext.report.run_dir import RunDir

FILE = "fit.json"
"""The request of ``fit`` in a run directory, written by ``prepare --fit``."""


class FitAgain(NamedTuple):
    """Attributes:
    chosen_us: iteration time of the choice that was trained, by the corrected costs; None if it no longer fits.
    better: whether another choice is certainly faster.
    """

    found: Found
    chosen_us: float | None
    better: bool

    def as_json(self) -> dict:
        winner = self.found.fit.winner
        options = {"options": winner.setting.options(), "iteration_time_us": winner.us}
        return {"another_is_better": self.better, "chosen_us": self.chosen_us, "fastest": options}

    def text(self) -> str:
        """The result in one line."""
        winner = self.found.fit.winner
        now = "" if self.chosen_us is None else f" (this one {self.chosen_us / 1e3:.0f} ms)"
        if not self.better:
            return f"fit, with the costs of this run: no other settings are certainly faster{now}"
        return f"fit, with the costs of this run: faster: {winner.us / 1e3:.0f} ms{now} with {winner.setting.text()}"


def search_again(run: RunDir, *, extrapolate: bool = False) -> FitAgain | None:
    """Search again for the request in the run directory; None if there is no request.

    Raises:
        InputError: the file is damaged, or the run measured nothing.
    """
    path = run.path / FILE
    if not path.exists():
        return None
    return again(json_files.load(path, Request), calibrate(run, extrapolate=extrapolate).table)


def again(request: Request, table: CostTable) -> FitAgain:
    """Search again by the request's data sheet, corrected with a cost table of the setting that was chosen."""
    problem = fit_problem_of(request, corrected_by=table)
    found = judge(request, problem, problem.search())
    chosen = next((one for one in found.fit.tried if one.setting.options() == request.chosen), None)
    winner = found.fit.winner
    better = winner.setting.options() != request.chosen
    if better and chosen is not None:
        better = found.certainty.ratio(chosen, winner).low > 1
    return FitAgain(found, chosen and chosen.us, better)
