"""What a plan is worth, in plain words and as figures."""

from typing import NamedTuple

from megatron_ext.cost.model import CostTable
from megatron_ext.errors import InputError
from megatron_ext.schedule.footprint import pinned_host_bytes
from megatron_ext.schedule.model import Schedule
from megatron_ext.simulator.simulate import run
from megatron_ext.simulator.stock import stock_schedule
from megatron_ext.simulator.timing import Timing
from megatron_ext.workload.model import Workload
from megatron_ext.workload.route import HIERARCHICAL


class Verdict(NamedTuple):
    """``text`` for people, ``figures`` for programs.

    ``figures``: ``step_time_us``, ``all_gpu_us`` (None where the table has no ``gpu`` route),
    ``gain`` (1 - step time / all-gpu), ``gain_us``, ``uncertainty_us`` (what the interval of
    the costs can move the gain by), ``helps``, ``lower_bound_us``, ``distance_to_bound``,
    ``limit`` (the limiting resource), ``left_out``.
    """

    text: str
    figures: dict


def verdict(workload: Workload, table: CostTable, schedule: Schedule, *, extrapolate: bool = False) -> Verdict:
    """Judge a planned schedule (with its ``predicted`` filled in)."""
    timing = Timing(workload, table, extrapolate=extrapolate)
    predicted = schedule.predicted
    assert predicted is not None, "only a planned schedule can be judged"
    ours = predicted.step_time_us
    bound = predicted.lower_bound_us or 0.0
    figures = {
        "step_time_us": ours, "all_gpu_us": None, "gain": None, "gain_us": None, "uncertainty_us": None, "helps": None,
        "lower_bound_us": bound, "distance_to_bound": ours / bound - 1 if bound else None,
        "limit": limiting_resource(predicted), "left_out": list(predicted.left_out),
    }  # fmt: skip
    lines = [f"predicted step time {ours / 1e3:.3f} ms"]
    stock, all_gpu = _stock_us(workload, timing)
    if all_gpu is not None:
        gain_us = all_gpu - ours
        uncertainty = max(gain_us - pessimistic_gain_us(workload, timing, stock, schedule), 0.0)
        helps = gain_us > max(uncertainty, 1e-9 * all_gpu)
        figures |= {"all_gpu_us": all_gpu, "gain": gain_us / all_gpu, "gain_us": gain_us, "uncertainty_us": uncertainty, "helps": helps}
        lines.append(f"gain over all-gpu {100 * gain_us / all_gpu:.2f} % ({all_gpu / 1e3:.3f} ms, as stock Megatron gathers), give or take {100 * uncertainty / all_gpu:.2f} points")
    if bound:
        lines.append(f"distance to the lower bound {100 * (ours / bound - 1):.2f} % (no schedule is nearer than 0 %)")
    lines.append(f"limit: {figures['limit']} (what is busy longest)")
    lines.append(f"bytes to bring an iteration, all ranks of a pipeline: {_by_route(schedule)}")
    if schedule.publish:
        need, limit = max(pinned_host_bytes(schedule)), schedule.limits.pinned_host_bytes
        lines.append(f"pinned host memory: {need / 2**20:.1f} MiB a node ({'no limit' if limit is None else f'limit {limit / 2**20:.1f} MiB'})")
    if predicted.left_out:
        lines.append(f"left out, because the cost table has no curve: {', '.join(predicted.left_out)}")
    if figures["helps"] is False:
        lines.append("this will not help you, as far as the measured costs can tell: the gain is under their uncertainty")
    elif figures["helps"]:
        lines.append("this should help you: the gain is more than the measured costs are uncertain by")
    return Verdict("\n".join(lines), figures)


def _by_route(schedule: Schedule) -> str:
    found: dict[str, int] = {}
    for rank in schedule.ranks:
        for actions in (rank.start.unshard, *(entry.unshard for entry in rank.steps)):
            for action in actions:
                found[action.route] = found.get(action.route, 0) + schedule.groups[action.group].bytes
    return ", ".join(f"{route} {size / 2**20:.1f} MiB" for route, size in sorted(found.items(), reverse=True)) or "none"


def _stock_us(workload: Workload, timing: Timing) -> tuple[Schedule, float | None]:
    """Stock Megatron's rule and its step time; None where its gathers were not measured."""
    stock = stock_schedule(workload)
    try:
        return stock, run(workload, timing, stock, bound_us=0.0).step_time_us
    except InputError:
        return stock, None


def limiting_resource(predicted) -> str:
    """The link or the compute that is busy longest."""
    return max(predicted.busy_us, key=lambda link: (predicted.busy_us[link], link)) if predicted.busy_us else "compute"


def pessimistic_gain_us(workload: Workload, timing: Timing, stock: Schedule, schedule: Schedule) -> float:
    """The gain if every cost lies at the end of its interval that speaks against the plan:
    all-gathers as fast as they may be, those in two legs, the other routes and publishing as slow."""
    against = timing.leaning({"gpu": "low_us", HIERARCHICAL: "high_us", "cpu": "high_us", "nvme": "high_us", "publish": "high_us"})
    ours = run(workload, against, schedule, bound_us=0.0).step_time_us
    return run(workload, against, stock, bound_us=0.0).step_time_us - ours
