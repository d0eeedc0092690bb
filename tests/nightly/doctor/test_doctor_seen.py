"""What the doctor is for: it fails where training is not equal, and runs under a launcher on several nodes."""

import json
import subprocess
import sys

import pytest
from training import environment, run


def findings(path) -> dict[str, dict]:
    return {finding["check"]: finding for finding in json.loads(path.read_text())["findings"]}


@pytest.mark.parametrize("fault", ["no_wait=1,publish_delay_ms=30", "skip_group=0", "stale_group=0"])
def test_training_that_differs_is_seen(megatron_tree, tmp_path, fault):
    out = tmp_path / "report.json"
    result = run(
        [sys.executable, "-m", "megatron_ext", "doctor", "--out", str(out)], env={"MEGATRON_EXT_FAULTS": fault}
    )
    assert result.returncode == 1, result.stdout
    failed = [finding for finding in findings(out).values() if finding["status"] == "fail"]
    assert failed and all(finding["check"].startswith("training") for finding in failed), failed


def test_two_nodes_under_torchrun(megatron_tree, tmp_path):
    out = tmp_path / "report.json"

    def agent(node: int) -> subprocess.Popen:
        launcher = ["--nnodes", "2", "--node-rank", str(node), "--nproc-per-node", "1"]
        launcher += ["--master-addr", "127.0.0.1", "--master-port", "29533"]
        command = [sys.executable, "-m", "torch.distributed.run", *launcher, "-m", "megatron_ext", "doctor"]
        return subprocess.Popen([*command, "--out", str(out)], env=environment(), stderr=subprocess.PIPE, text=True)

    agents = [agent(node) for node in range(2)]
    said = [one.communicate(timeout=300)[1] for one in agents]
    assert [one.returncode for one in agents] == [0, 0], said
    report = json.loads(out.read_text())
    assert (report["ranks"], report["nodes"]) == (2, 2)
    assert findings(out)["training: cpu_shard, zero stage 3"]["status"] == "pass"
