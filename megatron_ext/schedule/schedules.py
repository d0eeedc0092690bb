"""The schedules of one run, one for each number of micro-batches: a file for one number, or a directory of such files.

Between two iterations of a run only the steps change. What lies in memory is the same for all numbers: groups,
published copies, slots and limits. Only ``reduce_every`` of a group may differ, because it cannot be more than the
number.
"""

import hashlib
from pathlib import Path

from msgspec.structs import replace

from megatron_ext.formats import json_files
from megatron_ext.formats.errors import InputError
from megatron_ext.schedule import user_defined_schedule, validate
from megatron_ext.schedule.user_defined_schedule import Group, Schedule, files_of

SHARED = ("zero_stage", "model", "limits", "publish", "state_slots", "step_slots", "rollback_bytes")
"""Fields that are equal in all files of a directory. ``groups`` and ``parallel`` are equal too, except for the number
of micro-batches."""


def load(path) -> dict[int, Schedule]:
    """Read and validate the schedules in a file or a directory; by number of micro-batches, ascending.

    Raises:
        InputError: naming file, field and value; also if two files are for the same number, or differ in a field that
            must be the same.
    """
    found: dict[int, Schedule] = {}
    files = files_of(path)
    for file in files:
        schedule = validate.load(file)
        number = schedule.parallel.num_microbatches
        if number in found:
            message = f"another file in {Path(path).name} is for the same number"
            raise InputError(message, file=file, field="parallel.num_microbatches", value=number)
        if found:
            _check_same(next(iter(found.values())), schedule, file, files[0])
        found[number] = schedule
    return dict(sorted(found.items()))


def _check_same(first: Schedule, other: Schedule, file: Path, first_file: Path) -> None:
    why = f"differs from {first_file.name}: all schedules of a run must have the same layout of memory"
    if replace(other.parallel, num_microbatches=first.parallel.num_microbatches) != first.parallel:
        raise InputError(why, file=file, field="parallel")
    if len(other.groups) != len(first.groups):
        raise InputError(why, file=file, field="groups", value=len(other.groups))
    for index, (one, two) in enumerate(zip(first.groups, other.groups)):
        if clamped(one, 1) != clamped(two, 1):
            raise InputError(why, file=file, field=f"groups[{index}]")
    for name in SHARED:
        if getattr(first, name) != getattr(other, name):
            raise InputError(why, file=file, field=name)


def clamped(group: Group, number: int) -> Group:
    """The group in an iteration of ``number`` micro-batches. ``reduce_every`` is at most ``number``, because the
    gradient is reduced after the last micro-batch in any case."""
    return group if group.reduce_every <= number else replace(group, reduce_every=number)


def sha256(path) -> str:
    """The sha256 of one file, or of the names and contents of the files in a directory."""
    files = files_of(path)
    if files == [Path(path)]:
        return json_files.sha256(path)
    return hashlib.sha256("".join(f"{file.name} {json_files.sha256(file)}\n" for file in files).encode()).hexdigest()


def save(path, schedules: list[Schedule]) -> None:
    """Write one file per schedule, named by its number of micro-batches. Remove files of other numbers.

    Raises:
        InputError: ``path`` cannot be made a directory.
    """
    path = Path(path)
    wanted = {path / f"{schedule.parallel.num_microbatches}.json": schedule for schedule in schedules}
    json_files.make_directory(path)
    for file, schedule in wanted.items():
        user_defined_schedule.save(file, schedule)
    for file in path.glob("*.json"):
        if file.stem.isdecimal() and file not in wanted:
            file.unlink()
