"""The ``megatron-ext`` command: one thin function per verb.

Exit codes: 0 success, 2 bad input (one line that names file, field and value), 1 an
internal failure. ``--json`` puts one JSON object on standard output and the text
for people on standard error.

click (https://click.palletsprojects.com) parses nested verbs and typed options. It raises usage errors as exceptions,
which are turned into one line here.
"""

import sys

import click

from megatron_ext.cli import said_version
from megatron_ext.cli.balance import balance
from megatron_ext.cli.cost import cost_group
from megatron_ext.cli.describe import describe
from megatron_ext.cli.doctor import doctor
from megatron_ext.cli.fit import advise, fit
from megatron_ext.cli.hidden_devices import hidden_from
from megatron_ext.cli.measure import measure
from megatron_ext.cli.patch import patch
from megatron_ext.cli.plan import plan
from megatron_ext.cli.prepare_run import prepare
from megatron_ext.cli.report import report
from megatron_ext.cli.run_on_cpu import run_on_cpu
from megatron_ext.cli.schema import schema
from megatron_ext.cli.show import show
from megatron_ext.cli.simulate import simulate
from megatron_ext.formats.errors import InputError, RankFailed, one_line
from megatron_ext.workload.launcher_ranks import forget_single_task


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@said_version.option
def cli() -> None:
    """Measure gather routes, plan a user_defined_schedule, patch Megatron and train it by the schedule."""


PREPARING = (doctor, fit, advise, patch, prepare, describe, measure, cost_group, plan, balance)
LOOKING = (run_on_cpu, report, simulate, show, schema)
for verb in (*PREPARING, *LOOKING):
    cli.add_command(verb)


def main(argv: list[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    forget_single_task()
    try:
        with hidden_from(sys.argv[1:] if argv is None else argv):
            result = cli.main(args=argv, prog_name="megatron-ext", standalone_mode=False)
        return result if isinstance(result, int) else 0
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.ctx.get_help())
        return 2
    except click.ClickException as error:
        click.echo(f"megatron-ext: {one_line(error.format_message())}", err=True)
        return 2
    except InputError as error:
        text = str(error)
        click.echo(text if text.startswith("megatron-ext ") else f"megatron-ext: {text}", err=True)
        return 2
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        click.echo(f"megatron-ext: there is no package torch in this Python environment ({sys.executable})", err=True)
        return 2
    except RankFailed as error:
        click.echo(f"megatron-ext: {error}", err=True)
        return 1
    except click.exceptions.Abort:
        click.echo("megatron-ext: interrupted", err=True)
        return 130


if __name__ == "__main__":
    sys.exit(main())
