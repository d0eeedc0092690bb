"""An advice on one screen, and as one JSON object."""

import msgspec

from megatron_ext.formats import rank_memory
from megatron_ext.formats.errors import InputError
from megatron_ext.planner.advice import Advice, Outcome
from megatron_ext.planner.limit import WORDS, limit_of, limit_text
from megatron_ext.planner.verdict import option_hint


def as_json(advice: Advice) -> dict:
    """Every figure; times in microseconds, gains as parts of the other plan's iteration time."""
    return {
        "estimated": True,
        "hardware": advice.sheet.title,
        **figures(advice.outcome),
        "iteration_time_low_us": advice.iteration_us.low,
        "iteration_time_high_us": advice.iteration_us.high,
        "draws": advice.draws,
        "settings": {
            name: {"refused": str(other)} if isinstance(other, InputError) else figures(other)
            for name, other in advice.changed.items()
        },
        "not_tried": list(advice.left_out),
    }


def figures(outcome: Outcome) -> dict:
    """The figures of one setting."""
    times = outcome.best.times
    return {
        "answer": outcome.answer,
        "gain": outcome.gain,
        "gain_low": outcome.interval.low,
        "gain_high": outcome.interval.high,
        "iteration_time_us": times.iteration_time_us,
        "compared_with": outcome.compared_with,
        "compared_with_us": outcome.other.times.iteration_time_us,
        "stock_by_option_us": outcome.by_option_us or None,
        "gain_of_routes": _of_routes(outcome),
        "plan": outcome.best.name,
        "limit": limit_of(times.busy_us, times.iteration_time_us),
        "busy_us": times.busy_us,
        "exposed_us": times.exposed_us,
        "memory": msgspec.to_builtins(outcome.memory),
        "fits": outcome.short is None,
    }


def _of_routes(outcome: Outcome) -> float:
    """The part of the gain that better timing of all-gathers does not give."""
    gathers, other = (plan.times.iteration_time_us for plan in (outcome.gathers, outcome.other))
    return (gathers - outcome.best.times.iteration_time_us) / other


def as_text(advice: Advice) -> str:
    """One screen."""
    outcome, sheet = advice.outcome, advice.sheet
    times, other = outcome.best.times, outcome.other.times
    lines = [
        f"{_model(outcome)}",
        f"on {outcome.setting.parallel.world_size} GPUs: {sheet.title}",
        f"ESTIMATED from a data sheet, not measured. {_how(outcome)}",
        "",
        f"{_fit(outcome)}{outcome.answer}: gain over {outcome.compared_with} {outcome.gain:.1%} "
        f"({outcome.interval.low:.1%} to {outcome.interval.high:.1%}), of it by host copies {_of_routes(outcome):.1%}, "
        f"by timing {outcome.gain - _of_routes(outcome):.1%}",
        *(option_hint(outcome.compared_with, outcome.by_option_us) if outcome.by_option_us else []),
        f"iteration time {times.iteration_time_us / 1e3:.0f} ms ({advice.iteration_us.low / 1e3:.0f} to "
        f"{advice.iteration_us.high / 1e3:.0f}); {outcome.compared_with} {other.iteration_time_us / 1e3:.0f} ms",
        f"intervals: {advice.draws} machines drawn from the ranges of the sheet",
        limit_text(limit_of(times.busy_us, times.iteration_time_us)),
        f"busy: {_shares(outcome)} of the iteration",
        f"compute waits for parameters {times.exposed_us / times.iteration_time_us:.0%} of the iteration, "
        f"without the plan {other.exposed_us / other.iteration_time_us:.0%}",
        f"memory: {rank_memory.text(outcome.memory)}",
        f"        of {outcome.setting.device_bytes(sheet) / 2**20:.1f} MiB that a run may fill of a device's "
        f"{sheet.device.memory_bytes.value / 2**20:.0f}"
        + (f"; DOES NOT FIT: {outcome.short}" if outcome.short else ""),
        "",
        f"{'what else could be set':42} {'without':>10} {'plan':>10} {'gain':>7} {'device GiB':>11}  answer",
        *(_row(name, other) for name, other in advice.changed.items()),
    ]
    if advice.left_out:
        lines.append(f"not tried, because the workload is large: {', '.join(advice.left_out)}")
    return "\n".join(lines)


def _fit(outcome: Outcome) -> str:
    return "does not fit; " if outcome.short else ""


def _model(outcome: Outcome) -> str:
    shape, parallel = outcome.setting.shape, outcome.setting.parallel
    sizes = f"TP {parallel.tensor_model_parallel_size} x PP {parallel.pp} x VP {parallel.vp} x DP {parallel.dp}"
    numbers = f"{parallel.num_microbatches} micro-batches of {outcome.setting.batch.tokens} tokens"
    stage = f"zero stage {outcome.setting.zero_stage}"
    return f"{shape.numel / 1e9:.3g}B parameters, {shape.dtype}, {sizes}, {numbers}, {stage}"


def _how(outcome: Outcome) -> str:
    few = "; few micro-batches, continued linearly" if len(outcome.rounds.parts) > 1 else ""
    return f"A quick plan, no full search{few}."


def _shares(outcome: Outcome) -> str:
    times = outcome.best.times
    ordered = sorted(times.busy_us.items(), key=lambda item: -item[1])
    return ", ".join(f"{WORDS[link]} {us / times.iteration_time_us:.0%}" for link, us in ordered if us)


def _row(name: str, other: Outcome | InputError) -> str:
    if isinstance(other, InputError):
        return f"{name:42} {str(other).partition(' (')[0][:120]}"
    times = f"{other.other.times.iteration_time_us / 1e3:7.0f} ms {other.best.times.iteration_time_us / 1e3:7.0f} ms"
    memory = f"{other.memory.device_total_bytes / 2**30:11.1f}"
    return f"{name:42} {times} {other.gain:7.1%} {memory}  {_fit(other)}{other.answer}"
