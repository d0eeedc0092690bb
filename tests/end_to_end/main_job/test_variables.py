"""What both runs of the main job train with."""

import os
import re
import sys

import pytest
from places import ROOT

from megatron_ext.cpubench import allocator

SCRIPT = (ROOT / "scripts" / "pretrain_gpt_hybrid.sh").read_text()


@pytest.mark.parametrize(("on_gpu", "threads"), [(False, 1), (True, 14)])
def test_on_a_gpu_both_runs_have_the_threads_that_a_schedule_would_take(monkeypatch, capsys, on_gpu, threads):
    monkeypatch.setattr(allocator, "may_have_cuda", lambda environment: on_gpu)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(64))
    monkeypatch.setattr(sys, "argv", ["-c", "4"])
    monkeypatch.setattr(os, "environ", {"NCCL_NVLS_ENABLE": "1"})
    exec(re.findall(r"variables=\$\(python -c '(.*?)' \"\$world\"\)", SCRIPT, re.DOTALL)[0], {})
    said = capsys.readouterr().out.split()
    assert f"OMP_NUM_THREADS={threads}" in said and not any("NVLS" in one for one in said) and len(said) == 4
