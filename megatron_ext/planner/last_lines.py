"""The last lines of every verb that says whether a plan helps. They hold the result, because a reader looks at the end
first."""

from collections.abc import Sequence
from shlex import quote
from typing import NamedTuple

from megatron_ext.formats.errors import GIB
from megatron_ext.schedule.user_defined_schedule import Schedule


class ComparedRun(NamedTuple):
    """A training, and the time of one of its iterations.

    Attributes:
        by: the schedule that it trains by, or what it does without a schedule, in a few words.
        host_bytes: host memory of the node that holds most; None if it was not counted.
        refused: why it cannot train; empty if it can.
    """

    by: str
    iteration_time_us: float
    host_bytes: int | None = None
    refused: str = ""

    def text(self) -> str:
        ms, digits = self.iteration_time_us / 1e3, 3 if self.iteration_time_us < 1e6 else 1
        said = f"{ms:.{digits}f} ms, {self.by}"
        return f"{said} ({self.refused})" if self.refused else said


def by_time(runs: Sequence[ComparedRun]) -> list[ComparedRun]:
    """``runs`` from the fastest to the slowest, followed by those that cannot train."""
    return sorted(runs, key=lambda run: (bool(run.refused), run.iteration_time_us))


def last_lines(verdict: str, runs: Sequence[ComparedRun], *, add: str, take_out: str = "") -> list[str]:
    """The fastest of ``runs`` followed by the others, the host memory that it takes, the changes to the launch script's
    options, and the verdict."""
    ordered = by_time(runs)
    held = ordered[0].host_bytes
    return [
        f"fastest: {'; '.join(each.text() for each in ordered)}",
        f"host memory: {'not known' if held is None else f'{held / GIB:.2f} GiB per node'}",
        f"add: {add or 'nothing'}",
        *([f"take out: {take_out}"] if take_out else []),
        f"verdict: {verdict}",
    ]


def training_by(path: object, schedule: Schedule, drive: object = None) -> str:
    """Options, for a shell, that train by ``schedule``, which is at ``path``. ``drive`` is the directory on the
    drive."""
    at = f" --user-defined-schedule-nvme-path {quote(str(drive or 'DIRECTORY'))}" if schedule.uses_drive else ""
    return f"--user-defined-schedule {quote(str(path))}{at}"


def short_of(held_bytes: int, limit_bytes: int | None, where: str = "a device") -> str:
    """A text that says that ``held_bytes`` exceed a limit; empty if they do not."""
    if limit_bytes is None or held_bytes <= limit_bytes:
        return ""
    return f"does not fit: {held_bytes / GIB:.2f} GiB on {where}, of {limit_bytes / GIB:.2f}"
