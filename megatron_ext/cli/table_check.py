"""Shared by `plan` and `simulate`: their inputs, and the check that the cost table holds for the run."""

import contextlib
import functools

import click

from megatron_ext.cli import hidden_devices
from megatron_ext.formats.errors import InputError

ALLOW = "allow it with --allow-differences"


def planning_inputs(*, workload_required: bool = True):
    """A decorator that adds the options of a command that reads a cost table and a workload."""
    options = (
        click.option("--cost-table", required=True, help="Cost table of the machines."),
        click.option("--workload", "workload_path", required=workload_required, help="What is trained."),
        click.option("--extrapolate", is_flag=True, help="Read cost curves outside their measured range."),
        click.option(
            "--this-machine",
            is_flag=True,
            help="Also compare the table's hardware and software with this machine's, if this machine will train.",
        ),
        click.option(
            "--allow-differences",
            is_flag=True,
            help="Use a table measured for other parallel sizes, another precision or shape, and print what differs.",
        ),
    )
    return lambda command: functools.reduce(lambda made, option: option(made), reversed(options), command)


def table_differences(table, work, this_machine: bool, allow_differences: bool, *, file) -> list[str]:
    """What differs between the table's environment and the run. Allowed differences are printed on standard error.

    Raises:
        InputError: something differs and is not allowed.
    """
    from megatron_ext.cost import environment

    found = environment.run_differences(table.metadata, work)
    if this_machine:
        found += environment.environment_differences(table.metadata, hidden_devices.this_machine())
    for line in environment.refuse(found, allow=allow_differences, file=file, how=ALLOW):
        click.echo(f"{file}: measured in another environment: {line}", err=True)
    return found


@contextlib.contextmanager
def naming_files(cost_table: str, workload_path: str):
    """Add the file's name to an error that does not name the file it is about."""
    try:
        yield
    except InputError as error:
        if error.file is not None or (error.field or "").startswith("--"):
            raise
        from megatron_ext.cost.cost_table import CostTable

        root = (error.field or "").partition(".")[0].partition("[")[0]
        if root in CostTable.__struct_fields__:
            raise InputError(str(error), file=cost_table) from None
        raise InputError(str(error), file=None if root == "policy" else workload_path) from None
