"""A patched checkout that is started as on a GPU, by torchrun and without ``run-on-cpu``, trains on the CPU."""

import os
import re
import subprocess
import sys

import pytest
from adopting_page import PAGE
from places import ROOT

pytestmark = pytest.mark.timeout(1800)  # the first one runs all commands: minutes, where others work


def test_a_patched_script_under_torchrun_trains_without_a_gpu(ran):
    work, _ = ran
    text = re.search(r'ARGS="(.*?)"', PAGE.read_text(), re.S)[1]
    # One process: no pipeline. The script's own options only: what Megatron needs without a GPU is added by the hook.
    arguments = re.sub(r"--(pipeline|num-layers-per)\S+ \d+", "", text)
    for given, small in (
        ("--train-iters 14", "--train-iters 2"),
        ("--num-layers 8", "--num-layers 1"),
        ("size 8", "size 2"),
    ):
        assert given in arguments
        arguments = arguments.replace(given, small)
    assert "--no-persist-layer-norm" not in arguments and "--distributed-backend" not in arguments
    result = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]
        + [work / "Megatron-LM/pretrain_gpt.py", *arguments.split()],
        cwd=work,
        env={key: value for key, value in os.environ.items() if key != "MEGATRON_PATH"} | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    assert "megatron-ext: torch sees no CUDA device, so this trains on the CPU" in result.stderr
    assert re.search(r"iteration +2/ +2 ", result.stdout), result.stdout[-2000:]
