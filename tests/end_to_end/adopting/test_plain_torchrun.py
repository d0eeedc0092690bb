"""A patched checkout trains by a schedule, on its own ``megatron.training`` and without a GPU, to the last bit as by
Megatron's own gathers: started by torchrun as on a GPU, and by ``run-on-cpu``.

Measuring is replaced. tests/nightly runs the page as it stands.
"""

import os
import re
import sys

from adopting_page import PAGE, add_script, make_checkout
from places import ROOT
from plans import made_up_table
from warm_python import finished, warm_children

from megatron_ext import measure
from megatron_ext.cli import main as cli
from megatron_ext.launch import launcher
from megatron_ext.megatron import describe_from_checkout

SMALL = {"--train-iters 14": "--train-iters 4", "--num-layers 8": "--num-layers 1", "size 8": "size 2"}


def test_a_patched_script_trains_without_a_gpu(core, tmp_path, monkeypatch, capfd):
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

    script = [f"{tree}/pretrain_gpt.py", *arguments]
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1", *script]
    monkeypatch.delenv("MEGATRON_PATH", raising=False)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    done = finished([sys.executable, *words], tmp_path, dict(os.environ), imported="torch")
    reference = check_trained(done.returncode, done.stdout, done.stderr)
    assert "megatron-ext: torch sees no CUDA device, so this trains on the CPU" in reference
    assert "this was the reference" in reference
    for name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_MAX_CONNECTIONS"):  # the command sets them
        monkeypatch.setenv(name, "")
    monkeypatch.chdir(tmp_path)
    capfd.readouterr()
    with warm_children(launcher, "torch"):
        code = cli.main(["run-on-cpu", "--", *script])
    said = check_trained(code, *capfd.readouterr())
    assert "to the last bit: gradient norms of 4 iterations" in said


def check_trained(code: int, out: str, error: str) -> str:
    assert code == 0, error[-3000:]
    assert re.search(r"iteration +4/ +4 ", out), out[-2000:]
    return error + out
