"""benchmarks/robustness.py as root: ranks that are killed, and what it says of a rank that is not named."""

import subprocess
import sys

from places import ROOT
from training import environment

from megatron_ext.formats import json_files


def run(folder, corpus_prefix, *more: str) -> subprocess.CompletedProcess:
    command = [
        sys.executable,
        "benchmarks/robustness.py",
        "--folder",
        str(folder),
        "--out",
        str(folder / "robustness.json"),
    ]
    command += ["--data-path", str(corpus_prefix), *more]
    return subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=600)


def test_killed_ranks_and_several_jobs(corpus_prefix, tmp_path):
    done = run(tmp_path, corpus_prefix, "--parts", "kills", "jobs", "--kills", "8", "--seed", "3")
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    result = json_files.load(tmp_path / "robustness.json", dict)
    assert result["kills"]["faults"] == 8 and result["kills"]["rank named"] == result["kills"]["rank to be named"] > 0
    assert {row["what"] for row in result["jobs"]} > {"two jobs that save to one directory"}


def test_what_is_not_as_expected_ends_it_with_1(corpus_prefix, tmp_path):
    (tmp_path / "fuzzing").mkdir()
    found = {"inputs": 3, "refused": 2, "slowest_s": 0.1, "counts": {"KeyError: 'x'": 1}, "failures": {}}
    json_files.save(tmp_path / "fuzzing" / "workload.hypothesis.json", found)
    done = run(tmp_path, corpus_prefix, "--parts")
    assert done.returncode == 1 and "hypothesis: workload: KeyError: 'x'" in done.stdout
