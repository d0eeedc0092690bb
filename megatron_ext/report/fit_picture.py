"""The frontier of ``fit`` as a picture: iteration time over device bytes, with stock Megatron's settings as points."""

from megatron_ext.formats import picture
from megatron_ext.planner.fit.fit_text import GIB, parameters_text
from megatron_ext.planner.fit.found import Found


def save(found: Found, path) -> None:
    """Draw the picture and write it to ``path`` (PNG)."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5), layout="constrained")
    axes, fit = figure.subplots(), found.fit
    intervals = [found.certainty.interval(choice) for choice in fit.frontier]
    held, ms = ([choice.device_bytes / GIB for choice in fit.frontier], [choice.us / 1e3 for choice in fit.frontier])
    ends = ([interval.low / 1e3 for interval in intervals], [interval.high / 1e3 for interval in intervals])
    axes.plot(held, ms, "o-", color="tab:blue", drawstyle="steps-pre", label="fastest plan within these bytes")
    axes.vlines(held, *ends, color="tab:blue", alpha=0.4, linewidth=3)
    others = [choice for choice in fit.tried if choice not in fit.frontier]
    stock = [each for _, each in found.stock]
    said = "stock Megatron with and without recompute, optimizer on device or host"
    for points, mark, color, label in (
        (others, ".", "lightgrey", "other settings, planned"),
        (stock, "x", "tab:orange", said),
    ):
        axes.plot([p.device_bytes / GIB for p in points], [p.us / 1e3 for p in points], mark, color=color, label=label)
    changed = [fit.frontier[0]]
    changed += [one for before, one in zip(fit.frontier, fit.frontier[1:]) if one.setting != before.setting]
    for number, choice in enumerate(changed):
        _label(axes, choice.device_bytes, choice.us, choice.setting, 3 + 24 * (number % 3))
    for setting, each in found.stock:
        _label(axes, each.device_bytes, each.us, setting, 3)
    limit = found.limits.device_bytes
    if limit is not None:
        axes.axvline(limit / GIB, color="red", linestyle="--", linewidth=1, label="limit of device memory")
    axes.set_xlabel("GiB on the device of the rank that holds the most, by the memory bill")
    axes.set_ylabel("ms per iteration")
    axes.set_ylim(0, 1.15 * max([*ms, *(each.us / 1e3 for each in stock)]))
    axes.set_title(f"{parameters_text(fit.winner.setting)}, {fit.winner.setting.parallel.world_size} GPUs")
    axes.legend(fontsize=8, loc="lower left")  # the time axis begins at 0, so this corner is empty
    picture.save(path, figure)


def _label(axes, device_bytes: int, us: float, setting, above: float) -> None:
    text = setting.text(False).replace(", ", "\n")
    axes.annotate(text, (device_bytes / GIB, us / 1e3), fontsize=5, xytext=(3, above), textcoords="offset points")
