"""The commands of docs/adopting.md that need no GPU, run as they stand there, on a checkout."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import click
import pytest
from places import HELPERS, ROOT
from released import MIRROR

from megatron_ext.checkout import obtain
from megatron_ext.checkout.hook_table import HOOKS
from megatron_ext.cli.main import cli
from megatron_ext.formats.errors import InputError

PAGE = ROOT / "docs" / "adopting.md"
RELEASE = "0.17.1"
"""The first whose package on the index holds megatron/training."""

BLOCK = re.compile(r"```bash\n(.*?)```", re.S)


def commands() -> list[str]:
    """The blocks of the section on the CPU, in order."""
    section = PAGE.read_text().partition("\n## Five commands on a CPU\n")[2].partition("\n## ")[0]
    return [block.replace("--seconds 30", "--seconds 5") for block in BLOCK.findall(section)]


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


def make_checkout(work: Path, cache: Path) -> None:
    """The clone that the page's first command makes: of a mirror, or the package with a script of ours."""
    if MIRROR:
        subprocess.run(["git", "clone", "-q", "-b", f"core_v{RELEASE}", MIRROR, work / "Megatron-LM"], check=True)
    else:
        shutil.copytree(obtain(RELEASE, cache / RELEASE), work / "Megatron-LM")


def add_script(tree: Path) -> None:
    """A pretrain_gpt.py with its hook in place, where the tree has none."""
    place = tree / "pretrain_gpt.py"
    if not place.exists():
        hook = next(hook for hook in HOOKS if hook.file == place.name)
        text = (HELPERS / "small_pretrain_gpt.py").read_text()
        place.write_text(text.replace("import torch\n", f"{hook.line()}\nimport torch\n", 1))


@pytest.fixture(scope="module")
def ran(request, tmp_path_factory) -> tuple[Path, list[str]]:
    """Directory and output of the page's commands. The installed package is this one, so pip is left out, and costs are
    measured for less time."""
    cache = getattr(request.config, "cache", None)
    work = tmp_path_factory.mktemp("adopting")
    make_checkout(work, tmp_path_factory.mktemp("core") if cache is None else cache.mkdir("megatron-core"))
    environment = {key: value for key, value in os.environ.items() if key not in ("MEGATRON_PATH", "PYTHONPATH")}
    environment["PATH"] = os.pathsep.join([sysconfig.get_path("scripts"), environment["PATH"]])
    outputs = []
    for block in commands():
        if "git clone" in block or "pip install" in block:
            continue
        result = subprocess.run(
            ["bash", "-euc", f"[ -e args.sh ] && . ./args.sh; {block}"],
            cwd=work,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=300,
        )
        assert result.returncode == 0, f"{block}\n{result.stdout[-3000:]}"
        if "patch apply" in block:
            add_script(work / "Megatron-LM")
        outputs.append(result.stdout)
    return work, outputs


def test_the_commands_of_the_page_end_with_an_equal_run(ran):
    work, outputs = ran
    assert {path.name for path in (work / "runs/first").iterdir()} >= {"workload.json", "cost_table.json"}
    assert f"--user-defined-schedule {work}/runs/first/schedule.json" in "\n".join(outputs)
    reference, scheduled = outputs[-2:]
    assert "this was the reference" in reference and "median of" in reference
    for part in ("gathers by runs/first/schedule.json", "brought in one iteration", "predicted: iteration", "trace: "):
        assert part in scheduled
    assert "equal to the reference in runs/first/reference.json to the last bit" in scheduled
    assert "gained in an iteration" in scheduled


def test_a_second_prepare_keeps_everything(ran):
    work, _ = ran
    (block,) = (block for block in commands() if "prepare" in block)
    again = block.replace("megatron-ext", f"{sys.executable} -m megatron_ext")
    result = subprocess.run(
        ["bash", "-euc", f". ./args.sh; {again}"], cwd=work, capture_output=True, text=True, timeout=200
    )
    assert result.returncode == 0, result.stderr
    for name in ("workload", "cost_table", "schedule"):
        assert f"kept: runs/first/{name}.json" in result.stderr
    assert "measuring" not in result.stderr
