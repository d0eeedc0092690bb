"""An advice as one picture: iteration time with its interval, memory by kind, other settings."""

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from megatron_ext.formats import picture
from megatron_ext.planner.advice import Advice, Outcome
from megatron_ext.planner.limit import WORDS


def save(advice: Advice, path) -> None:
    """Write the picture (PNG) to ``path``."""
    figure = Figure(figsize=(13, 4.2))
    FigureCanvasAgg(figure)
    times, memory, settings = figure.subplots(1, 3, width_ratios=(1, 0.8, 1.4))
    _times(times, advice)
    _memory(memory, advice)
    _settings(settings, advice)
    figure.suptitle(f"{advice.outcome.answer} (estimated from a data sheet: {advice.sheet.title})", fontsize=11)
    figure.tight_layout()
    picture.save(path, figure)


def _times(axes, advice: Advice) -> None:
    """What the links of the busiest rank do, beside the iteration time."""
    outcome = advice.outcome
    times, middle = outcome.best.times, outcome.best.times.iteration_time_us
    interval = [[(middle - advice.iteration_us.low) / 1e3], [(advice.iteration_us.high - middle) / 1e3]]
    names = [
        outcome.compared_with.replace("Megatron with", "Megatron\nwith").partition(" (")[0],
        "plan",
        *(WORDS[link] for link in times.busy_us),
    ]
    values = [outcome.other.times.iteration_time_us, middle, *times.busy_us.values()]
    colours = ["tab:grey", "tab:blue"] + ["tab:cyan"] * len(times.busy_us)
    axes.barh(names, [us / 1e3 for us in values], color=colours)
    axes.errorbar([middle / 1e3], [1], xerr=interval, color="black", capsize=4)
    axes.invert_yaxis()
    axes.set_xlabel("ms an iteration")
    axes.set_title(f"gain {outcome.gain:.1%} ({outcome.interval.low:.1%} to {outcome.interval.high:.1%})", fontsize=10)


def _memory(axes, advice: Advice) -> None:
    below = 0.0
    for kind, size in advice.outcome.memory.device_bytes.items():
        axes.bar([0], [size / 2**30], bottom=below, label=kind.replace("_", " "), width=0.6)
        below += size / 2**30
    axes.axhline(advice.sheet.device.memory_bytes.value / 2**30, color="red", linestyle="--", label="device memory")
    axes.set_xticks([])
    axes.set_xlim(-0.4, 2.2)
    axes.set_ylabel("GiB of the fullest device")
    axes.legend(fontsize=7, loc="center right")
    axes.set_ylim(0, 1.08 * max(below, advice.sheet.device.memory_bytes.value / 2**30))
    axes.set_title("memory by kind", fontsize=10)


def _settings(axes, advice: Advice) -> None:
    rows = [("as given", advice.outcome)]
    rows += [(name, other) for name, other in advice.changed.items() if isinstance(other, Outcome)]
    for place, (_, outcome) in enumerate(rows):
        us = outcome.best.times.iteration_time_us
        axes.barh([place], [us / 1e3], color="tab:blue" if outcome.short is None else "lightgrey")
        note = f" {outcome.gain:+.1%}" + ("" if outcome.short is None else ", does not fit")
        axes.text(us / 1e3, place, note, va="center", fontsize=7)
    axes.set_yticks(range(len(rows)), [name.removeprefix("--") for name, _ in rows], fontsize=7)
    axes.invert_yaxis()
    axes.margins(x=0.2)
    axes.set_xlabel("ms an iteration, with the plan's gain")
    axes.set_title("other settings", fontsize=10)
