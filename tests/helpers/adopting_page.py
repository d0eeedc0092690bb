"""The commands of docs/adopting.md that need no GPU, and a checkout to run them on."""

import os
import re
import shutil
import subprocess
import sysconfig
from pathlib import Path

from core_tree import obtain
from places import HELPERS, MEGATRON, ROOT
from released import MIRROR

from megatron_ext.checkout.hook_table import HOOKS

PAGE = ROOT / "docs" / "adopting.md"
RELEASE = "0.17.1"
"""The first whose package on the index holds megatron/training."""

BLOCK = re.compile(r"```bash\n(.*?)```", re.S)


SHORTER = {"--seconds 30": "--seconds 4", "--train-iters 14": "--train-iters 5"}
"""What stands on the page, and what is run instead of it: it measures and trains for less time."""

SMALLER = SHORTER | {
    "--num-layers 8": "--num-layers 2",
    "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 2": "",
    "--seconds 30": "--seconds 3",
}
"""Two ranks instead of four, with two layers: every command is there, the pipeline is not."""

AGAIN = "the same command continues from the kept results"
"""What measuring says where a busy machine leaves it too little of so few seconds."""


def cpu_commands(instead: dict[str, str]) -> list[str]:
    """The blocks of the section on the CPU, in order, but for what is in ``instead``."""
    section = PAGE.read_text().partition("\n## Five commands on a CPU\n")[2].partition("\n## ")[0]
    assert all(given in section for given in instead)
    return [re.sub("|".join(instead), lambda found: instead[found[0]], block) for block in BLOCK.findall(section)]


def run_page(work: Path, cache: Path, instead: dict[str, str]) -> list[str]:
    """Run these commands in ``work``; returns what each has written. The installed package is this one, so pip is left
    out."""
    make_checkout(work, cache)
    environment = {key: value for key, value in os.environ.items() if key not in ("MEGATRON_PATH", "PYTHONPATH")}
    environment["PATH"] = os.pathsep.join([sysconfig.get_path("scripts"), environment["PATH"]])
    outputs = []
    for block in cpu_commands(instead):
        if "git clone" in block or "pip install" in block:
            continue
        command = ["bash", "-euc", f"[ -e args.sh ] && . ./args.sh; {block}"]
        pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for _ in range(4):
            result = subprocess.run(command, cwd=work, env=environment, timeout=900, **pipes)
            if AGAIN not in result.stdout:
                break
        assert result.returncode == 0, f"{block}\n{result.stdout[-3000:]}"
        if "patch apply" in block:
            add_script(work / "Megatron-LM")
        outputs.append(result.stdout)
    return outputs


def check_outputs(work: Path, outputs: list[str]) -> None:
    """What the page says of its last commands."""
    assert {path.name for path in (work / "runs/first").iterdir()} >= {"workload.json", "cost_table.json"}
    prepared = next(said for said in outputs if "\nverdict: " in said)
    # The second: costs that were measured beside other work may say that the plan does not help.
    lines = (f"\nadd: --user-defined-schedule {work}/runs/first/schedule.json\n", "\nadd: nothing\n")
    assert any(line in prepared for line in lines), prepared
    reference, scheduled = outputs[-2:]
    assert "this was the reference" in reference and "median of" in reference
    for part in ("gathers by runs/first/schedule.json", "brought in one iteration", "predicted: iteration", "trace: "):
        assert part in scheduled
    assert "equal to the reference in runs/first/reference.json to the last bit" in scheduled
    assert "gained in an iteration" in scheduled


def make_checkout(work: Path, cache: Path) -> None:
    """The clone that the page's first command makes: of a mirror, or the package with a script of ours."""
    if MIRROR:
        subprocess.run(["git", "clone", "-q", "-b", f"core_v{RELEASE}", MIRROR, work / "Megatron-LM"], check=True)
    else:
        shutil.copytree(obtain(RELEASE, cache / RELEASE), work / "Megatron-LM")
        # The release has no wheel for Python 3.10, so it lacks the compiled helper. The pinned release has the same.
        compiled = f"megatron/core/datasets/helpers_cpp{sysconfig.get_config_var('EXT_SUFFIX')}"
        shutil.copy(MEGATRON / compiled, work / "Megatron-LM" / compiled)


def add_script(tree: Path) -> None:
    """A pretrain_gpt.py with its hook in place, where the tree has none."""
    place = tree / "pretrain_gpt.py"
    if not place.exists():
        hook = next(hook for hook in HOOKS if hook.file == place.name)
        text = (HELPERS / "small_pretrain_gpt.py").read_text()
        place.write_text(text.replace("import torch\n", f"{hook.line()}\nimport torch\n", 1))
