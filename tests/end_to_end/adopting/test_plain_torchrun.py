"""A patched checkout trains by a schedule, on its own ``megatron.training`` and without a GPU, to the last bit as by
Megatron's own gathers: started by torchrun as on a GPU, and by ``run-on-cpu``.

Measuring is replaced. tests/nightly runs the page as it stands.
"""

import os
import re
import subprocess
import sys

from adopting_page import PAGE, add_script, make_checkout
from places import ROOT
from plans import made_up_table
from warm_python import warm_children

from megatron_ext import measure
from megatron_ext.cli import main as cli
from megatron_ext.megatron import describe_from_checkout

SMALL = {"--train-iters 14": "--train-iters 4", "--num-layers 8": "--num-layers 1", "size 8": "size 2"}


def test_a_patched_script_trains_without_a_gpu(core, tmp_path, monkeypatch):
    make_checkout(tmp_path, core)
    tree, prepared = str(tmp_path / "Megatron-LM"), tmp_path / "run"
    assert cli.main(["patch", "apply", tree]) == 0
    add_script(tmp_path / "Megatron-LM")
    # One process: no pipeline. The script's own options only: what Megatron needs without a GPU is added by the hook.
    arguments = re.sub(r"--(pipeline|num-layers-per)\S+ \d+", "", re.search(r'ARGS="(.*?)"', PAGE.read_text(), re.S)[1])
    assert all(given in arguments for given in SMALL)
    arguments = re.sub("|".join(SMALL), lambda found: SMALL[found[0]], arguments).split()
    assert "--no-persist-layer-norm" not in arguments and "--distributed-backend" not in arguments
    monkeypatch.setattr(measure, "measure", lambda options: made_up_table())
    with warm_children(describe_from_checkout, "torch"):
        words = ["--out", str(prepared), "--policy", "all-cpu", "--data-parallel-size", "1", "--", *arguments]
        assert cli.main(["prepare", "--checkout", tree, *words]) == 0
    arguments += ["--user-defined-schedule", str(prepared / "schedule.json")]
    arguments += ["--user-defined-schedule-check", str(prepared / "reference.json")]

    def trained(*command) -> str:
        result = subprocess.run(
            [sys.executable, "-m", *command, f"{tree}/pretrain_gpt.py", *arguments],
            cwd=tmp_path,
            env={key: value for key, value in os.environ.items() if key != "MEGATRON_PATH"} | {"PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=500,
        )
        assert result.returncode == 0, result.stderr[-3000:]
        assert re.search(r"iteration +4/ +4 ", result.stdout), result.stdout[-2000:]
        return result.stderr + result.stdout

    reference = trained("torch.distributed.run", "--standalone", "--nproc-per-node", "1")
    assert "megatron-ext: torch sees no CUDA device, so this trains on the CPU" in reference
    assert "this was the reference" in reference
    assert "to the last bit: gradient norms of 4 iterations" in trained("megatron_ext", "run-on-cpu", "--")
