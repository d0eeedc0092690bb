"""The verdict on a plan, as text and as figures."""

import contextlib
from math import inf
from typing import NamedTuple

import msgspec

from megatron_ext.cost.activations import with_activations
from megatron_ext.cost.cost_table import CostTable
from megatron_ext.formats import rank_memory
from megatron_ext.formats.errors import InputError
from megatron_ext.planner.baselines import best_of_gathers
from megatron_ext.planner.candidate import Candidate
from megatron_ext.planner.finish import finished
from megatron_ext.planner.gain_interval import Gain, dominant_cost, gain_interval
from megatron_ext.planner.last_lines import ComparedRun, last_lines
from megatron_ext.planner.problem import Problem
from megatron_ext.planner.stock import OVERLAPPED, STOCK_RULES
from megatron_ext.planner.what_limits import limit_of, limit_text
from megatron_ext.planner.within_memory import gathers_within_memory
from megatron_ext.planner.without_plan import without_plan
from megatron_ext.schedule.footprint import pinned_host_bytes
from megatron_ext.schedule.memory_bill import host_bytes_of_nodes, keeps_device_bytes
from megatron_ext.schedule.schedule_text import bytes_by_route
from megatron_ext.schedule.user_defined_schedule import Predicted, Schedule
from megatron_ext.simulator.simulation import simulate
from megatron_ext.simulator.timing import Timing
from megatron_ext.workload.route import ALL_GATHER
from megatron_ext.workload.workload import Workload

LEAST_GAIN = 0.01
"""The smallest gain that counts as help."""

HELPS, HELPS_NOT, CANNOT_TELL = "helps", "does not help", "cannot tell"
"""The three answers of a verdict."""

ONLY_A_RUN = "The simulator's own error is larger than that of the costs: measure iterations of both"
"""The advice if measuring costs better is unlikely to turn ``cannot tell`` into an answer."""

LAYERS_ANEW = "every layer gathered again, as FSDP does"
"""The rule of :func:`megatron_ext.planner.stock.stock_schedule` at zero stage 3, where stock Megatron has no rule."""


def rule_of(workload: Workload) -> str:
    """Name of the rule that is simulated if there is no schedule."""
    return OVERLAPPED if workload.zero_stage < 3 else f"{LAYERS_ANEW} (stock Megatron has no zero stage 3)"


class Verdict(NamedTuple):
    """A judgement of a schedule. ``said`` is for people, ``figures`` for programs, ``runs`` are the runs with the
    schedule and without any plan.

    ``figures`` (times in microseconds; gains as parts of the other plan's iteration time; None if there is no figure):

    * ``answer``, one of the three answers, and ``helps`` (None for ``cannot tell``).
    * ``compared_with``, ``compared_with_us``: the faster of stock Megatron with and without ``--overlap-param-gather``,
      or at zero stage 3 the best plan by all-gathers alone.
    * ``stock_by_option_us``: iteration times of stock Megatron with and without that option, by name (empty at zero
    stage
      3). A gain of one option over the other is not a gain of the plan.
    * ``gain`` and ``gain_us``: the expected gain, the median over ``samples`` perturbed tables. ``gain_low`` and
      ``gain_high``: the ends of its 90 % interval over the same tables. ``uncertainty_us``: the distance of the farther
      end from ``gain_us``. ``gain_on_table``: the gain on the given table, on which the plan was chosen. It may lie
      outside the interval (:mod:`megatron_ext.planner.gain_interval`).
    * ``stock_us`` (zero stage 1), ``layers_anew_us`` (zero stage 3), ``gathers_only`` (a name), ``gathers_only_us``.
      ``gain_of_timing``, ``gain_of_routes``: parts of ``gain_on_table``.
    * ``missing``: what the table lacks. ``measure_better``: what to measure better, if the answer is ``cannot tell``
    and
      the costs contribute more to the interval than the simulator's own error does.
    * ``iteration_time_us``, ``lower_bound_us``, ``distance_to_bound``, ``limit`` (a name of ``busy_us``), ``left_out``,
      ``memory`` (the memory bill by pipeline rank), ``host_bytes_per_node`` of the node that holds most.
    * ``without_plan``: ``by``, ``iteration_time_us`` and ``host_bytes`` of stock Megatron at zero stage 1, and why it
      is ``refused`` if it does not fit.
    """

    said: tuple[str, ...]
    figures: dict
    runs: tuple[ComparedRun, ...]

    @property
    def text(self) -> str:
        return "\n".join([*self.said, f"verdict: {self.conclusion}"])

    @property
    def conclusion(self) -> str:
        """The answer and why, in a sentence or two."""
        return conclusion_of(self.figures)

    def ending(self, add: str) -> list[str]:
        """The last lines of output. ``add``: options that train by the schedule; they are shown if the schedule is
        needed."""
        return last_lines(self.conclusion, self.runs, add=add if self.is_needed else "")

    @property
    def is_needed(self) -> bool:
        """Whether to train by the schedule: it may help, or nothing without it trains as fast."""
        ours, *others = self.runs
        as_fast = ours.iteration_time_us * (1 + LEAST_GAIN)
        without = any(not each.refused and each.iteration_time_us <= as_fast for each in others)
        return self.figures["helps"] is not False or not without


ITSELF = "this plan"
"""The name of the best plan by all-gathers alone, if it is the plan that is compared."""


class Comparison(NamedTuple):
    """The plans that a plan is compared with. A plan is given by its name, its schedule and its iteration time.

    Attributes:
        other: what a user would run without the plan.
        gathers: the best plan by all-gathers alone.
        naive_us: iteration time by the rule without any planning; None if that rule does not keep
            ``limits.device_bytes``.
        by_option_us: iteration times of stock Megatron by option; empty at zero stage 3.
    """

    other: tuple[str, Schedule, float]
    gathers: tuple[str, Schedule, float]
    naive_us: float | None
    by_option_us: dict[str, float]


def compare_with(
    workload: Workload, timing: Timing, planned: Schedule, *, as_trained: bool = False
) -> Comparison | None:
    """The plans to compare ``planned`` with. None if all-gathers were not measured for these sizes, or if no plan by
    all-gathers alone keeps ``limits.device_bytes``.

    Args:
        planned: a plan on the same table. At zero stage 3 it may itself be the best plan by all-gathers alone.
        as_trained: compare with ``--overlap-param-gather`` even if Megatron would be faster without it, because
            measured runs of stock Megatron use this option.
    """
    names = STOCK_RULES if workload.zero_stage < 3 else (OVERLAPPED,)
    stock = {name: STOCK_RULES[name](workload) for name in names}
    try:
        by_option_us = {name: simulate(workload, timing, each).iteration_time_us for name, each in stock.items()}
    except InputError:
        return None
    option = OVERLAPPED if as_trained else min(by_option_us, key=lambda name: by_option_us[name])
    naive, naive_us = stock[option], by_option_us[option]
    if workload.limits.device_bytes is not None and workload.zero_stage == 3:
        try:
            schedule = gathers_within_memory(Problem(with_activations(workload, timing.table), timing, ()))
            best = _stepped_alike("gathers-only", schedule, workload, timing)
        except InputError:  # no plan by all-gathers alone keeps the limits
            return None
    else:
        known_us = planned.predicted.baselines_us if planned.predicted is not None else None
        best = best_of_gathers(workload, timing, known_us) or ("all-gpu", naive, naive_us)
        with contextlib.suppress(InputError):
            best = _stepped_alike(*best[:2], workload, timing)
    best = _or_itself(best, planned)
    if workload.zero_stage < 3:
        return Comparison((option, naive, naive_us), best, naive_us, by_option_us)
    alone = (f"the best plan by all-gathers alone ({best[0]})", *best[1:])
    return Comparison(alone, best, naive_us if keeps_device_bytes(naive, workload) else None, {})


def _or_itself(best: tuple[str, Schedule, float], planned: Schedule) -> tuple[str, Schedule, float]:
    """The best plan by all-gathers alone: ``planned`` if it uses all-gathers alone and is as fast as ``best``."""
    us = planned.predicted.iteration_time_us if planned.predicted is not None else inf
    alone = all(action.route == ALL_GATHER for action in planned.unshards)
    return (ITSELF, planned, us) if alone and us <= best[2] else best


def _stepped_alike(name: str, schedule: Schedule, workload: Workload, timing: Timing) -> tuple[str, Schedule, float]:
    """Name, schedule and iteration time, with states resting and the host stepping as ``hybrid`` would choose for this
    schedule. What a plan gains over the result then comes from its gathers alone. Raises InputError."""
    if workload.optimizer.on_host:
        schedule = finished(Candidate(with_activations(workload, timing.table), timing, schedule)).schedule
    return name, schedule, simulate(workload, timing, schedule).iteration_time_us


def verdict(
    workload: Workload, table: CostTable, schedule: Schedule, *, extrapolate: bool = False, as_trained: bool = False
) -> Verdict:
    """Judge a planned schedule (with its ``predicted`` filled in). ``as_trained``: see :func:`compare_with`."""
    predicted = schedule.predicted
    assert predicted is not None, "only a planned schedule can be judged"
    figures = _of_plan(predicted)
    timing = Timing(workload, table, extrapolate=extrapolate)
    against = compare_with(workload, timing, schedule, as_trained=as_trained)
    lines = [f"predicted iteration time {predicted.iteration_time_us / 1e3:.3f} ms"]
    if against is not None:
        name, other, _ = against.other
        gain = gain_interval(workload, table, schedule, other, extrapolate=extrapolate)
        answer = answer_of_gain(gain.low, gain.high, gain.surely)
        figures |= _of_gain(predicted.iteration_time_us, against, gain, answer)
        if answer == CANNOT_TELL and not gain.by_model:
            figures["measure_better"] = dominant_cost(workload, table, schedule, other, extrapolate=extrapolate)
        lines += _gain_lines(figures)
    lines += _plan_lines(figures, schedule, predicted)
    on_nodes = max(host_bytes_of_nodes(schedule, with_activations(workload, table)))
    known_us = against.by_option_us if against is not None else None
    without = without_plan(workload, table, known_us=known_us, extrapolate=extrapolate)
    figures |= {"host_bytes_per_node": on_nodes, "without_plan": without and without._asdict()}
    ours = ComparedRun("this schedule", predicted.iteration_time_us, on_nodes)
    return Verdict(tuple(lines), figures, (ours,) if without is None else (ours, without))


def answer_of_gain(low: float, high: float, surely: float | None = None) -> str:
    """``helps`` if the interval of a gain lies above 1 % and, if given, the lower end of a wider interval lies above
    0."""
    if low > LEAST_GAIN and (surely is None or surely > 0):
        return HELPS
    return HELPS_NOT if high < LEAST_GAIN else CANNOT_TELL


def conclusion_of(figures: dict) -> str:
    """The answer and why, in a sentence or two."""
    without = figures["without_plan"]
    needed = "needed, because without a plan these settings do not fit" if without and without["refused"] else ""
    if figures["answer"] is None:
        return needed or "none, there is nothing to compare with"
    other = figures["compared_with"]
    if needed and (other in STOCK_RULES or other.endswith(f"({ITSELF})")):  # stock does not fit, or nothing else does
        return needed
    over = "its gain" if needed else f"its gain over {other}"
    said = {
        HELPS: f"helps. The whole interval of {over} lies above {LEAST_GAIN:.0%}",
        HELPS_NOT: f"does not help. The whole interval of {over} lies below {LEAST_GAIN:.0%}",
        CANNOT_TELL: "cannot tell from these costs",
    }[figures["answer"]]
    if needed:
        said = f"{needed}. Compared with {other}: {said}"
    elif without and without["iteration_time_us"] < figures["iteration_time_us"] and figures["answer"] != HELPS_NOT:
        said += f", but {without['by']} is faster"
    better = figures["measure_better"]
    if figures["answer"] == CANNOT_TELL:
        said += f". Measure better: {better}" if better else f". {ONLY_A_RUN}"
    return said


def _of_plan(predicted: Predicted) -> dict:
    ours, bound = predicted.iteration_time_us, predicted.lower_bound_us or 0.0
    names = "answer helps compared_with compared_with_us gain gain_us gain_low gain_high uncertainty_us samples"
    names += " gain_on_table stock_us layers_anew_us gathers_only gathers_only_us gain_of_timing gain_of_routes missing"
    names += " measure_better stock_by_option_us"
    return {
        "iteration_time_us": ours,
        **dict.fromkeys(names.split()),
        "lower_bound_us": bound,
        "distance_to_bound": ours / bound - 1 if bound else None,
        "limit": limit_of(predicted.busy_us, ours),
        "left_out": list(predicted.left_out),
        "memory": msgspec.to_builtins(predicted.memory),
    }


def _of_gain(ours: float, against: Comparison, gain: Gain, answer: str) -> dict:
    name, _, other_us = against.other
    gathers_name, _, gathers_us = against.gathers
    return {
        "answer": answer,
        "helps": {HELPS: True, HELPS_NOT: False}.get(answer),
        "compared_with": name,
        "compared_with_us": other_us,
        "stock_by_option_us": against.by_option_us or None,
        "gain": gain.gain,
        "gain_us": gain.gain * other_us,
        "gain_low": gain.low,
        "gain_high": gain.high,
        "uncertainty_us": max(gain.gain - gain.low, gain.high - gain.gain) * other_us,
        "samples": gain.samples,
        "gain_on_table": gain.on_table,
        ("stock_us" if against.by_option_us else "layers_anew_us"): against.naive_us,
        "gathers_only": gathers_name,
        "gathers_only_us": gathers_us,
        "gain_of_timing": (against.naive_us - gathers_us) / against.naive_us if against.naive_us else None,
        "gain_of_routes": (gathers_us - ours) / other_us,
        "missing": list(gain.missing),
    }


def _gain_lines(figures: dict) -> list[str]:
    other = f"gain over {figures['compared_with']} ({figures['compared_with_us'] / 1e3:.3f} ms)"
    if figures["samples"]:
        interval = f"{figures['gain_low']:.2%} to {figures['gain_high']:.2%}"
        known = f"as far as its costs are known (90 %, median of {figures['samples']} perturbed tables)"
        lines = [f"{other}: {figures['gain']:.2%}, {interval} {known}", _on_table(figures)]
    else:
        lines = [f"{other}: {figures['gain']:.2%}: it is the same plan"]
    split = f"{figures['gathers_only']}, {figures['gathers_only_us'] / 1e3:.3f} ms"
    if figures["stock_us"] is not None:
        lines.append(
            f"of that {figures['gain_of_timing']:.2%} by better timing (best plan by all-gathers alone: {split}), "
            f"{figures['gain_of_routes']:.2%} by other routes"
        )
    elif figures["gain_of_timing"] is not None:
        lines.append(
            f"better timing alone: {figures['gain_of_timing']:.2%} ({split}, compared with {LAYERS_ANEW}: "
            f"{figures['layers_anew_us'] / 1e3:.3f} ms; stock Megatron has no zero stage 3)"
        )
    if figures["stock_by_option_us"]:
        lines += option_hint(figures["compared_with"], figures["stock_by_option_us"])
    lines += [f"not in the cost table: {text}" for text in figures["missing"]]
    return lines


def option_hint(compared_with: str, by_option_us: dict[str, float]) -> list[str]:
    """One line with the gain of Megatron's own option, if it is 0.1 % or more: no plan may claim it."""
    best = min(by_option_us, key=lambda name: by_option_us[name])
    best_us, worst_us = by_option_us[best], max(by_option_us.values())
    gain = 1 - best_us / worst_us
    if gain < 0.001:
        return []
    what = "Megatron's own --overlap-param-gather" if best == OVERLAPPED else "leaving --overlap-param-gather out"
    where = "is in the gain above" if compared_with != best else "is not counted as a gain of the plan"
    return [f"hint: {what} gains {gain:.2%} by itself ({worst_us / 1e3:.3f} to {best_us / 1e3:.3f} ms), which {where}"]


def _on_table(figures: dict) -> str:
    """The gain on the given table, if it lies outside the interval, and why it differs from the expected gain."""
    text = f"on this table itself: {figures['gain_on_table']:.2%}"
    if figures["gain_low"] <= figures["gain_on_table"] <= figures["gain_high"]:
        return text
    if figures["gain_on_table"] < figures["gain_low"]:
        return f"{text}, less than on most equally likely tables"
    why = ", and figures that it lacks are taken as 0" if figures["missing"] else ""
    return f"{text}, more than expected: the plan was chosen because it is fast on it{why}"


def _plan_lines(figures: dict, schedule: Schedule, predicted: Predicted) -> list[str]:
    lines = []
    if figures["distance_to_bound"] is not None:
        lines.append(f"distance to the lower bound {figures['distance_to_bound']:.2%} (no schedule is nearer than 0 %)")
    lines.append(limit_text(figures["limit"]))
    lines.append(f"bytes gathered per iteration, all ranks of a pipeline: {bytes_by_route(schedule)}")
    if schedule.publish:
        need, limit = max(pinned_host_bytes(schedule)), schedule.limits.pinned_host_bytes
        allowed = "no limit" if limit is None else f"limit {limit / 2**20:.1f} MiB"
        lines.append(f"pinned host memory: {need / 2**20:.1f} MiB per node ({allowed})")
    lines += [f"memory rank {rank}: {rank_memory.text(memory)}" for rank, memory in enumerate(predicted.memory)]
    return lines
