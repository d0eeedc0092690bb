"""``megatron-ext doctor`` on a machine without a GPU: it runs, and says what it could not try."""

import json
import sys

from training import run

from megatron_ext.cli import main as cli


def doctor(*options, env=None):
    return run([sys.executable, "-m", "megatron_ext", "doctor", *map(str, options)], env=env)


def test_everything_that_needs_no_gpu_passes(megatron_tree, tmp_path):
    result = doctor("--out", tmp_path / "report.json", "--nproc", 2, "--json")
    assert result.returncode == 0, result.stderr
    said = json.loads(result.stdout)
    status = {finding["check"]: finding["status"] for finding in said["findings"]}
    assert (
        said["failed"] is False and json.loads((tmp_path / "report.json").read_text())["findings"] == said["findings"]
    )
    trained = [name for name in status if name.startswith("training")]
    assert [name for name in trained if status[name] != "pass"] == [
        "training: nvme, zero stage 3"
    ]  # no drive was given
    assert len(trained) == 8
    assert status["process namespace"] == status["host pages"] == status["communicators"] == "pass"
    for name in ("pinning", "stream memory operations", "overlap: all-gather, compute", "cuda"):
        assert status[name] == "could not try"


def test_a_check_that_hangs_is_given_up_and_the_report_says_which(tmp_path):
    result = doctor("--out", tmp_path / "report.json", "--nproc", 1, "--check-seconds", 1, env={"PYTHONPATH": ""})
    assert result.returncode == 1, result.stderr
    (failed,) = [f for f in json.loads((tmp_path / "report.json").read_text())["findings"] if f["status"] == "fail"]
    assert failed["check"] in ("overlap", "training") and failed["found"] == "did not end"
    assert "given up after 1 s" in result.stderr


def test_bad_input_is_one_line(tmp_path, capsys):
    for options, words in (
        (["--nvme", "/no/such/place"], "is no directory"),
        (["--checkout", str(tmp_path)], "holds no megatron/core"),
        (["--schedule", str(tmp_path / "none.json")], "cannot be read"),
        (["--out", str(tmp_path / "r.json"), "--device", "cuda"], "sees no CUDA device"),
    ):
        assert cli.main(["doctor", *options]) == 2
        said = capsys.readouterr().err
        assert words in said and len(said.splitlines()) == 1
