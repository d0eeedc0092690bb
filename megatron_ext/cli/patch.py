"""``megatron-ext patch``: insert the hook lines into a Megatron tree, check them, or take them out."""

from dataclasses import asdict

import click

from megatron_ext.checkout import apply, check, patch_text, revert
from megatron_ext.cli.output import emit, json_option
from megatron_ext.cli.script_command import entry_option


@click.group()
def patch() -> None:
    """Patch a Megatron-LM checkout, an unpacked release, or the core-only tree from PyPI."""


checkout_argument = click.argument("checkout", default=".", envvar="MEGATRON_PATH")


def _look_at(entry: str | None, checkout: str) -> str | None:
    """One line about the training script. Raises InputError if the hooks in the tree do not reach it."""
    if entry is None:
        return None
    from megatron_ext.checkout.entry_script import look_at
    from megatron_ext.megatron.describe_from_checkout import require_script

    return look_at(*require_script(checkout, entry))


dry_run_option = click.option("--dry-run", is_flag=True, help="Show the diff and change nothing.")


def _changing(verb: str, change, said: str) -> None:
    """Add the command ``verb``, which calls ``change(checkout, dry_run=...)``."""

    @patch.command(verb, help=said)
    @checkout_argument
    @entry_option
    @dry_run_option
    @json_option
    def command(checkout: str, entry: str | None, dry_run: bool, as_json: bool) -> None:
        said = _look_at(entry, checkout)
        report = change(checkout, dry_run=dry_run)
        text = patch_text.as_text(report, verb)
        emit(as_json, {**asdict(report), "entry": said}, "\n".join(filter(None, (text, said))))


_changing("apply", apply, "Insert the hook lines; a patched tree stays as it is.")


@patch.command("check")
@checkout_argument
@json_option
def patch_check(checkout: str, as_json: bool) -> int:
    """Say whether the tree is clean, applied, drifted or in conflict; the last two end with exit code 1."""
    report = check(checkout)
    emit(as_json, asdict(report), patch_text.as_text(report, "check"))
    return 1 if report.state in ("drifted", "conflict") else 0


_changing("revert", revert, "Take every hook line out; the owner's changes stay.")


@patch.command("list")
@click.argument("checkout", required=False)
@json_option
def patch_list(checkout: str | None, as_json: bool) -> None:
    """List the supported releases and the lines that are inserted."""
    payload = patch_text.releases(checkout)
    emit(as_json, payload, patch_text.releases_text(payload))
