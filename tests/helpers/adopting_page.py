"""The commands of docs/adopting.md that need no GPU, and a checkout to run them on."""

import re
import shutil
import subprocess
from pathlib import Path

from places import HELPERS, ROOT
from released import MIRROR

from megatron_ext.checkout import obtain
from megatron_ext.checkout.hook_table import HOOKS

PAGE = ROOT / "docs" / "adopting.md"
RELEASE = "0.17.1"
"""The first whose package on the index holds megatron/training."""

BLOCK = re.compile(r"```bash\n(.*?)```", re.S)


def cpu_commands() -> list[str]:
    """The blocks of the section on the CPU, in order, measuring and training for less time."""
    section = PAGE.read_text().partition("\n## Five commands on a CPU\n")[2].partition("\n## ")[0]
    shorter = {"--seconds 30": "--seconds 4", "--train-iters 14": "--train-iters 5"}
    return [re.sub("|".join(shorter), lambda found: shorter[found[0]], block) for block in BLOCK.findall(section)]


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
