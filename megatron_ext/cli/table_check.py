"""What `plan` and `simulate` share: their inputs, and whether the cost table holds for the run."""

import contextlib

import click

from megatron_ext.cli import hidden_devices
from megatron_ext.formats.errors import InputError


def planning_inputs(*, workload_required: bool = True):
    """A decorator: the options of a command that reads a cost table and a workload."""
    options = (
        click.option("--cost-table", required=True, help="Cost table of the machines."),
        click.option("--workload", "workload_path", required=workload_required, help="What is trained."),
        click.option("--extrapolate", is_flag=True, help="Read cost curves outside their measured range."),
        click.option(
            "--this-machine",
            is_flag=True,
            help="Compare the table's hardware and software with this machine's too: it is the one that trains.",
        ),
        click.option(
            "--allow-differences",
            is_flag=True,
            help="Use a table measured for other parallel sizes, another precision or shape; say what differs.",
        ),
    )

    def decorate(command):
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


def table_differences(table, work, *, this_machine: bool, allow: bool, file) -> list[str]:
    """What differs between the table's environment and the run; said on standard error if allowed.

    Raises:
        InputError: something differs and is not allowed.
    """
    from megatron_ext.cost import environment

    found = environment.run_differences(table.metadata, work)
    if this_machine:
        found += environment.differences(table.metadata, hidden_devices.this_machine())
    for line in environment.refuse(found, allow=allow, file=file, how="allow it by --allow-differences"):
        click.echo(f"{file}: measured in another environment: {line}", err=True)
    return found


@contextlib.contextmanager
def naming_files(cost_table: str, workload_path: str):
    """Say which of the files given an error is about, where the error itself could not know."""
    try:
        yield
    except InputError as error:
        if error.file is not None:
            raise
        from megatron_ext.cost.cost_table import CostTable

        root = (error.field or "").partition(".")[0].partition("[")[0]
        if root in CostTable.__struct_fields__:
            raise InputError(str(error), file=cost_table) from None
        raise InputError(str(error), file=None if root == "policy" else workload_path) from None
