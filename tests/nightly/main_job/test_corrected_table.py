"""A cost table with wrong figures, a real run, ``cost calibrate``, another plan and run: the error falls to what the
machine repeats."""

import json
from statistics import median

from planning_cases import WHOLE, make_table
from plans import command_line, describe
from training import launch_training

from megatron_ext import report
from megatron_ext.cost import cost_table as cost

MODEL = """--num-layers 4 --hidden-size 256 --num-attention-heads 4 --seq-length 128 --micro-batch-size 2
    --global-batch-size 16 --untie-embeddings-and-output-weights""".split()


def trained(folder, table, corpus_prefix) -> tuple[float, list[float]]:
    """By how much the plan by ``table`` predicts its iteration wrong, and what iterations took; no stock run is made.
    ``folder`` then has the corrected table."""
    cost.save(folder / "cost_table.json", table)
    given = ["--cost-table", folder / "cost_table.json", "--workload", folder / "workload.json"]
    planned = command_line("plan", *given, "--out", folder / "schedule.json", "--policy", "share-50")
    assert planned.returncode == 0, planned.stderr
    by = ["--user-defined-schedule", folder / "schedule.json"]
    by += ["--user-defined-schedule-trace", folder / "scheduled.trace.json"]
    result = launch_training([*MODEL, "--data-path", corpus_prefix, "--train-iters", "10", *by], nproc=2)
    assert result.returncode == 0, result.stderr
    said = command_line("cost", "calibrate", folder, "--json")
    assert said.returncode == 0, said.stderr
    return json.loads(said.stdout)["error"][0], report.load(folder).iteration_us[2:]


def test_the_error_falls_to_what_the_machine_repeats(corpus_prefix, tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    for folder in (first, second):
        folder.mkdir()
        work = describe(folder / "workload.json", [*MODEL, "--data-parallel-size", "2"])
    wrong = make_table(work, forward=3e3, backward=3e3, **WHOLE)
    before, took = trained(first, wrong, corpus_prefix)
    after, again = trained(second, cost.load(first / "calibrated.cost_table.json"), corpus_prefix)
    middle = median(again)
    repeats = max(abs(us / middle - 1) for us in (median(took), *sorted(again)[1:-1]))
    assert abs(before) > 0.5 and abs(after) < max(repeats, 0.1), (before, after, took, again)
