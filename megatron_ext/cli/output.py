"""Output of all verbs: one JSON object on standard output with ``--json``, otherwise text."""

import os
import sys

import click
import msgspec

from megatron_ext.formats.errors import InputError, with_gib


def emit(as_json: bool, payload: dict, text: str) -> None:
    """Print ``payload`` as one JSON object, or ``text`` for people, with GiB added after large numbers of bytes.

    With ``--json`` the text goes to standard error, so a pipe reads only the object.
    """
    text = with_gib(text)
    if as_json and text:
        click.echo(text, err=True)
    try:
        click.echo(msgspec.json.encode(payload).decode() if as_json else text)
        sys.stdout.flush()
    except OSError as error:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - stays open; else the interpreter writes again when it ends
        raise InputError(f"cannot be written: {error.strerror}", file="standard output") from None


json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object on standard output.")
