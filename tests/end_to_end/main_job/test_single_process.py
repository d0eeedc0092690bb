"""The example trains the same model whatever the parallel sizes: against one process."""

import json

from training import PP2_VP2_DP2, SMALL, launch_training

COMMON = [*SMALL, "--init-by-name", "--micro-batch-size", "1", "--global-batch-size", "8", "--train-iters", "10"]


def test_loss_equals_that_of_one_process_within_rounding(corpus_prefix, tmp_path):
    one, four = tmp_path / "one.json", tmp_path / "four.json"
    data = ["--data-path", corpus_prefix]
    alone = launch_training([*COMMON, *data, "--metrics-path", one], nproc=1)
    assert alone.returncode == 0, alone.stderr
    together = launch_training([*COMMON, *data, *PP2_VP2_DP2, "--metrics-path", four])
    assert together.returncode == 0, together.stderr
    expected, got = json.loads(one.read_text())["loss"], json.loads(four.read_text())["loss"]
    assert len(expected) == len(got) == 10
    worst = max(abs(a - b) / abs(a) for a, b in zip(expected, got))
    assert worst <= 5e-6, (worst, expected, got)
    assert expected[-1] < expected[0] - 0.5, "the model learns, so equal losses mean something"
