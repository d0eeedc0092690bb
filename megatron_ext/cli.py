"""The ``megatron-ext`` command: one thin function a verb.

Exit codes: 0 success, 2 bad input (one line that names file, field and value), 1 an
internal failure. ``--json`` puts one JSON object on standard output and everything
meant for people on standard error.

click (https://click.palletsprojects.com) parses: nested verbs and typed options, with
usage errors as exceptions that are turned into one line here.
"""

import sys

import click
import msgspec

from megatron_ext import __version__
from megatron_ext.errors import InputError


def emit(as_json: bool, payload: dict, text: str) -> None:
    """Print ``payload`` as one JSON object, or ``text`` for people.

    With ``--json`` the text goes to standard error, so a pipe reads only the object.
    """
    if as_json:
        if text:
            click.echo(text, err=True)
        click.echo(msgspec.json.encode(payload).decode())
    else:
        click.echo(text)


json_option = click.option("--json", "as_json", is_flag=True, help="One JSON object on standard output.")


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="megatron-ext")
def cli() -> None:
    """Measure gather routes, plan a user_defined_schedule, patch and train Megatron by it."""


def main(argv: list[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    try:
        result = cli.main(args=argv, prog_name="megatron-ext", standalone_mode=False)
        return result if isinstance(result, int) else 0
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.ctx.get_help())
        return 2
    except click.ClickException as error:
        click.echo(f"megatron-ext: {error.format_message()}", err=True)
        return 2
    except InputError as error:
        click.echo(f"megatron-ext: {error}", err=True)
        return 2
    except click.exceptions.Abort:
        click.echo("megatron-ext: interrupted", err=True)
        return 130


if __name__ == "__main__":
    sys.exit(main())
