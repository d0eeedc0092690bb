"""``megatron-ext show``: a schedule as a text grid."""

import click

from megatron_ext.cli.output import emit, json_option


@click.command()
@click.argument("schedule_path", metavar="SCHEDULE")
@click.option("--all", "every_row", is_flag=True, help="Print every row, however many there are.")
@json_option
def show(schedule_path: str, every_row: bool, as_json: bool) -> None:
    """Print the steps, and which groups each step unshards; an arrow marks where an invalid schedule fails.

    +3c>7@1 unshards group 3 by cpu just before layer 1, needed by step 7 (g: gpu, s: cpu_shard, n: nvme; h, e: gpu,
    hierarchical or by copy engines). -3@1 reshards group 3 just after layer 1. s2:0 stages group 2 into slot 0.
    """
    from megatron_ext.schedule import schedule_text as showing
    from megatron_ext.schedule import user_defined_schedule, validate

    schedule = user_defined_schedule.read_unchecked(schedule_path)
    failure = None
    try:
        validate.validate(schedule, file=schedule_path)
    except validate.InvalidSchedule as error:
        failure = error
    text = showing.grid(schedule, failure, every_row=every_row)
    payload = {"valid": failure is None, "error": None if failure is None else str(failure)}
    payload |= {name: getattr(failure, name, None) for name in ("pp_rank", "step_index")}
    emit(as_json, payload | {"grid": text}, f"{showing.summary(schedule)}\n{text}")
    if failure is not None:
        raise failure
