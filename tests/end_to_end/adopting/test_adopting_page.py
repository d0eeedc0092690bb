"""The commands of docs/adopting.md and of the README are understood; those that need no GPU are run by
tests/nightly."""

import re
from pathlib import Path

import click
import pytest
from adopting_page import PAGE
from places import ROOT

from megatron_ext.cli.main import cli
from megatron_ext.formats.errors import InputError


def spoken(path: Path) -> list[list[str]]:
    """Every ``megatron-ext`` command of a page, as words; ``$ARGS`` are those of args.sh."""
    arguments = re.search(r'ARGS="(.*?)"', PAGE.read_text(), re.S)[1]
    text = path.read_text().replace("\\\n", " ").replace("-m megatron_ext ", "megatron-ext ").replace("$ARGS", "@ARGS")
    found = re.findall(r"(?<![-/\w\[])megatron-ext ((?:patch )?[a-z][-a-z]* [^`#&|'\n]*)", text)
    commands = [command.split() for command in found]
    return [
        [word for part in words for word in (arguments.split() if part == "@ARGS" else [part])]
        for words in commands
        if words[0] in cli.commands and "..." not in words
    ]


@pytest.mark.parametrize("page", [PAGE, ROOT / "README.md"], ids=["adopting", "README"])
def test_every_command_of_the_pages_is_understood(page):
    """Options exist and do not contradict each other. Nothing is run."""
    commands = spoken(page)
    assert {words[0] for words in commands} >= {"patch", "prepare", "run-on-cpu"}
    for words in commands:
        if "--hidden-size" in words[: words.index("--") if "--" in words else 0]:
            with pytest.raises(InputError, match="give it once"):  # the page's example of a contradiction
                understand(cli, words)
        else:
            understand(cli, words)


def understand(command: click.Command, words: list[str], parent=None) -> None:
    context = command.make_context(command.name, list(words), parent=parent)
    if isinstance(command, click.Group):
        _, verb, rest = command.resolve_command(context, [*context._protected_args, *context.args])
        understand(verb, rest, context)
