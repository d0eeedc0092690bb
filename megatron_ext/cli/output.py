"""Output of all verbs: one JSON object on standard output with ``--json``, otherwise text."""

import os
import sys
from collections.abc import Mapping, Sequence

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


def fp8_lines(megatron_options: Sequence[str]) -> list[str]:
    """A line that says what estimates do not count, if a script's options train in fp8."""
    if not any(option.startswith("--fp8-format") for option in megatron_options):
        return []
    copies = "fp8 copies of weights, up to 2 bytes per parameter in Transformer Engine"
    return [f"not counted: {copies}; estimated times are those of 16 bits"]


def say_taken(verb: str | None, taken: Mapping[str, object]) -> None:
    """Say on standard error which options were not given, and what they were taken to be."""
    if taken:
        said = ", ".join(f"{option} {value}" for option, value in taken.items())
        click.echo(f"{verb}: not given, taken to be: {said}", err=True)
