"""Checks of the figures in a schedule: bytes of groups and limits, and predicted times and bytes."""

from megatron_ext.formats.checks import MOST_US, Checker
from megatron_ext.formats.rank_memory import DEVICE_KINDS, HOST_KINDS, RankMemory
from megatron_ext.schedule.user_defined_schedule import Predicted, Schedule
from megatron_ext.workload.parallel import Parallel

ROUNDING = 1e-6
"""Relative difference that rounding may leave between two sums of the same figures."""


def check_figures(schedule: Schedule, checker: Checker) -> None:
    """Refuse times and sizes that are not plausible, and predictions that contradict themselves.

    Raises:
        InputError: of the checker's class, naming file, field and value.
    """
    for index, group in enumerate(schedule.groups):
        checker.size(group.bytes, f"groups[{index}].bytes")
    for name in schedule.limits.__struct_fields__:
        checker.size(getattr(schedule.limits, name), f"limits.{name}")
    for field in ("state_slots", "step_slots"):
        for name in ("slots", "slot_bytes"):
            checker.size(getattr(getattr(schedule, field), name, None), f"{field}.{name}")
    checker.size(schedule.rollback_bytes, "rollback_bytes")
    options = schedule.metadata.options
    checker.positive(options.proven_gap, "metadata.options.proven_gap", zero=True)
    if options.nvme is not None:
        options.nvme.check("metadata.options.nvme", file=checker.file)
    if schedule.predicted is not None:
        _check_predicted(schedule.predicted, schedule.parallel, checker)


def _check_predicted(predicted: Predicted, parallel: Parallel, checker: Checker) -> None:
    longest = predicted.iteration_time_us
    checker.duration(longest, "predicted.iteration_time_us")
    _check_time(predicted.gather_us, "gather_us", checker)
    within = {f"exposed_us[{rank}]": us for rank, us in enumerate(predicted.exposed_us)}
    if predicted.lower_bound_us is not None:
        within["lower_bound_us"] = predicted.lower_bound_us
    for name, us in within.items():
        _check_time(us, name, checker)
        if us > longest * (1 + ROUNDING):
            checker.refuse(f"is longer than the iteration's {longest:g} us", f"predicted.{name}", us)
    for name in ("busy_us", "baselines_us"):
        for key, us in getattr(predicted, name).items():
            _check_time(us, f"{name}.{key}", checker)
    checker.positive(predicted.bubble_rate, "predicted.bubble_rate", zero=True)
    if predicted.bubble_rate is not None and predicted.bubble_rate > 1:
        checker.refuse("expected 0 to 1", "predicted.bubble_rate", predicted.bubble_rate)
    counts = {"device": parallel.pp, "staging": parallel.pp, "pinned_host": parallel.num_nodes}
    for name, sizes in predicted.peak_bytes.items():
        if name not in counts:
            checker.refuse(f"known: {', '.join(counts)}", f"predicted.peak_bytes.{name}")
        _check_count(counts[name], sizes, f"predicted.peak_bytes.{name}", checker)
        for index, size in enumerate(sizes):
            checker.size(size, f"predicted.peak_bytes.{name}[{index}]")
    _check_count(parallel.pp, predicted.exposed_us, "predicted.exposed_us", checker)
    if predicted.memory:
        _check_count(parallel.pp, predicted.memory, "predicted.memory", checker)
    for index, memory in enumerate(predicted.memory):
        _check_memory(memory, f"predicted.memory[{index}]", checker)


def _check_time(us: float | None, name: str, checker: Checker) -> None:
    """Check a sum or a difference of times. It may be 0, or as small as rounding leaves it."""
    checker.positive(us, f"predicted.{name}", zero=True)
    if us is not None and us > MOST_US:
        checker.refuse(f"is not a plausible time: expected at most {MOST_US:g} us", f"predicted.{name}", us)


def _check_count(expected: int, figures: tuple, field: str, checker: Checker) -> None:
    if len(figures) != expected:
        checker.refuse(f"expected {expected} figures", field, len(figures))


def _check_memory(memory: RankMemory, field: str, checker: Checker) -> None:
    for name, kinds in (("device_bytes", DEVICE_KINDS), ("host_bytes", HOST_KINDS)):
        for kind, size in getattr(memory, name).items():
            if kind not in kinds:
                checker.refuse(f"known: {', '.join(kinds)}", f"{field}.{name}.{kind}")
            checker.size(size, f"{field}.{name}.{kind}")
    checker.size(memory.nvme_bytes, f"{field}.nvme_bytes")
