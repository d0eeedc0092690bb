"""``megatron-ext --version``: the version, the commit if it is known, and the releases that there are patches for."""

import importlib.metadata
import json
import subprocess
from pathlib import Path

import click

from megatron_ext import __version__
from megatron_ext.checkout import patchset

HELP = "Print the version, the commit and the releases of Megatron-LM that there are patches for, and exit."
ROOT = Path(__file__).resolve().parents[2]


def _say(context: click.Context, _parameter: click.Parameter, wanted: bool) -> None:
    if wanted:
        commit = _commit()
        click.echo(f"megatron-ext {__version__}{f', commit {commit}' if commit else ''}")
        click.echo(f"patches for Megatron-LM {patchset.known_releases()}")
        context.exit()


def _commit() -> str | None:
    """The commit of the clone that this file lies in or that pip installed from; None if neither is known."""
    if (ROOT / ".git").exists():
        command = ["git", "-C", str(ROOT), "rev-parse", "--short=10", "HEAD"]
        try:
            return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
        except (OSError, subprocess.CalledProcessError):
            return None
    try:
        origin = importlib.metadata.distribution("megatron-ext").read_text("direct_url.json")
    except importlib.metadata.PackageNotFoundError:
        return None
    return json.loads(origin or "{}").get("vcs_info", {}).get("commit_id")


option = click.option("--version", is_flag=True, is_eager=True, expose_value=False, callback=_say, help=HELP)
