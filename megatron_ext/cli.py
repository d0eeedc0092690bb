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


@cli.group()
def patch() -> None:
    """Hook a Megatron-LM checkout, an unpacked release, or the core-only tree from PyPI."""


checkout_argument = click.argument("checkout", default=".", envvar="MEGATRON_PATH")
dry_run_option = click.option("--dry-run", is_flag=True, help="Show the diff and change nothing.")


@patch.command("apply")
@checkout_argument
@dry_run_option
@json_option
def patch_apply(checkout: str, dry_run: bool, as_json: bool) -> None:
    """Insert the hook lines; a patched tree stays as it is."""
    from megatron_ext.checkout import apply, show

    report = apply(checkout, dry_run=dry_run)
    emit(as_json, show.as_dict(report), show.as_text(report, "apply"))


@patch.command("check")
@checkout_argument
@json_option
def patch_check(checkout: str, as_json: bool) -> None:
    """Say whether the tree is clean, applied, drifted or in conflict."""
    from megatron_ext.checkout import check, show

    report = check(checkout)
    emit(as_json, show.as_dict(report), show.as_text(report, "check"))


@patch.command("revert")
@checkout_argument
@dry_run_option
@json_option
def patch_revert(checkout: str, dry_run: bool, as_json: bool) -> None:
    """Take every hook line out; the owner's changes stay."""
    from megatron_ext.checkout import revert, show

    report = revert(checkout, dry_run=dry_run)
    emit(as_json, show.as_dict(report), show.as_text(report, "revert"))


@patch.command("list")
@click.argument("checkout", required=False)
@json_option
def patch_list(checkout: str | None, as_json: bool) -> None:
    """List the releases that are served and the lines that are inserted."""
    from megatron_ext.checkout import show

    payload = show.releases(checkout)
    emit(as_json, payload, show.releases_text(payload))


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
