"""``megatron-ext schema``: the JSON schema of a file kind."""

import click
import msgspec

from megatron_ext.cli.output import emit


@click.command()
@click.argument("kind", type=click.Choice(["cost_table", "workload", "user_defined_schedule"]))
def schema(kind: str) -> None:
    """Print the JSON schema of a file kind, for writing such files by hand or with a program."""
    from megatron_ext.cost.cost_table import CostTable
    from megatron_ext.schedule.user_defined_schedule import Schedule
    from megatron_ext.workload.workload import Workload

    struct = {"cost_table": CostTable, "workload": Workload, "user_defined_schedule": Schedule}[kind]
    emit(False, {}, msgspec.json.format(msgspec.json.encode(msgspec.json.schema(struct))).decode())
