"""Schema versions of the project's files."""

from megatron_ext.formats.errors import InputError

COMMANDS = {
    "cost_table": "megatron-ext measure --out FILE ...",
    "workload": "megatron-ext describe --out FILE ...",
    "hardware_sheet": "megatron-ext cost hardware NAME --json > FILE",
    "user_defined_schedule": "megatron-ext plan --cost-table T --workload W --out FILE",
}
"""For each kind of file, the command that makes it."""

SCHEMA_VERSION = 2
"""Schema version of cost tables and workloads."""

SCHEDULE_VERSION = 3
"""Schema version of schedules. Since version 3 groups say their ranks."""


def check_version(kind: str, version: int, *, file=None) -> None:
    """Refuse a file of another schema version.

    Raises:
        InputError: naming the version and the command that makes the file again.
    """
    ours = SCHEDULE_VERSION if kind == "user_defined_schedule" else SCHEMA_VERSION
    if version != ours:
        message = f"this release reads version {ours}; make the file again: {COMMANDS[kind]}"
        raise InputError(message, file=file, field="schema_version", value=version)
