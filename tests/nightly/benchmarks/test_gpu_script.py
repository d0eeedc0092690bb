"""``benchmarks/gpu.sh`` on a machine without a GPU: every line but the device's own runs."""

import json
import subprocess

import pytest
from places import ROOT


def script(*words: str, **environment: str) -> subprocess.CompletedProcess:
    command = ["env", *(f"{name}={value}" for name, value in environment.items()), "bash", "benchmarks/gpu.sh", *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)


@pytest.mark.parametrize(
    ("words", "environment", "said"),
    [
        (["--dry"], {}, "'--dry': expected --dry-run or nothing"),
        (["--dry-run"], {"ITERS": "3"}, "ITERS = '3': at least 4 are needed"),
        (["--dry-run"], {"NVME": "/no/such/place"}, "NVME = '/no/such/place': no such directory"),
        ([], {}, "torch sees no CUDA device here; nothing was started"),
        ([], {"PYTHON": "/no/such/python"}, "no Python here has torch"),
    ],
)
def test_what_it_cannot_run_is_one_line(words, environment, said):
    result = script(*words, **{"PYTHON": ".venv/bin/python", **environment})
    assert result.returncode == 2 and result.stderr.count("\n") == 1 and said in result.stderr, result.stderr


def test_a_dry_run_runs_every_part(megatron_tree, tmp_path):
    out = tmp_path / "out"
    result = script("--dry-run", NVME=str(tmp_path), OUT=str(out), NAME="gpu-dry-run-test")
    assert result.returncode == 0, result.stderr[-4000:]
    report = json.loads((out / "doctor_report.json").read_text())
    assert not [finding for finding in report["findings"] if finding["status"] == "fail"]
    assert {path.name for path in out.iterdir()} >= {"cost_table.one_gpu.json", "gpu_streaming.json"}
    assert "stock beside scheduled training" in result.stderr and "bitwise" in result.stdout
