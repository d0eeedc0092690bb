"""``scripts/test_gpu.sh`` without a GPU: ranks in one small case, so that no change breaks what only a GPU runs whole.

tests/nightly/gpu/test_gpu_tier.py runs all of its cases."""

import json
import subprocess
import sys

from places import ROOT
from training import environment

CASE = "small, 2 ranks: zero 3, cpu_shard, gradients host, shards host, states host, early, cast on host"


def test_two_ranks_train_a_case_on_the_stand_in(megatron_tree, tmp_path):
    out = tmp_path / "report.json"
    command = [sys.executable, "tests/gpu/run.py", "--dry-run", "--out", str(out), "--only", CASE]
    done = subprocess.run(command, cwd=ROOT, env=environment({}), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    (result,) = json.loads(out.read_text())["results"]
    assert (result["case"], result["status"]) == (CASE, "pass") and "equal to the last bit" in result["said"]
