"""Output of the example while it trains: one line per iteration, or a progress bar; and what it keeps of each."""

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


def kept_once(kept: dict[bytes, dict], value: msgspec.Struct) -> dict:
    """``value`` as a dictionary, one for all equal values: otherwise 10,000 iterations would take 10 MB. ``kept``: all
    so far."""
    return kept.setdefault(msgspec.json.encode(value), msgspec.to_builtins(value))


def iteration_log(total: int, *, start: int, every: int, title: str | None, silent: bool):
    """The log of a training run on this rank. All ranks except one should be ``silent``."""
    if silent:
        return _Silent()
    return _Bar(total, start, title) if title else _Lines(total, every)


class _Silent:
    def iteration(self, iteration: int, loss: float, grad_norm: float | None, elapsed_us: float) -> None:
        """Do nothing: another rank prints."""

    def close(self) -> None:
        """Do nothing."""


class _Lines:
    def __init__(self, total: int, every: int):
        self.total, self.every = total, max(every, 1)

    def iteration(self, iteration: int, loss: float, grad_norm: float | None, elapsed_us: float) -> None:
        if iteration % self.every:
            return
        norm = "skipped" if grad_norm is None else f"{grad_norm:.4f}"
        print(
            f"iteration {iteration:5d}/{self.total} | lm loss {loss:.6f} | grad norm {norm} | "
            f"{elapsed_us / 1e3:8.1f} ms",
            flush=True,
        )

    def close(self) -> None:
        """Do nothing: every line is already printed."""


class _Bar:
    def __init__(self, total: int, start: int, title: str):
        self.progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[last]}"),
            console=Console(stderr=True),
        )
        self.progress.start()
        self.task = self.progress.add_task(title, total=total, completed=start, last="")

    def iteration(self, iteration: int, loss: float, grad_norm: float | None, elapsed_us: float) -> None:
        self.progress.update(self.task, completed=iteration, last=f"lm loss {loss:.4f}, {elapsed_us / 1e3:.0f} ms")

    def close(self) -> None:
        self.progress.stop()
