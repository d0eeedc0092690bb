"""After a run: the request that the run directory keeps is searched again with what the run has measured."""

from types import SimpleNamespace

from msgspec.structs import replace

from megatron_ext.cost.scaled_table import Factors, scaled
from megatron_ext.formats import json_files
from megatron_ext.planner.fit.request import Request, fit_problem_of
from megatron_ext.report import fit_again

WORDS = """--num-layers 2 --hidden-size 4096 --num-attention-heads 32 --seq-length 2048 --bf16 --micro-batch-size 1
    --untie-embeddings-and-output-weights --global-batch-size 8""".split()
FIXED = ("micro-batch-size", "zero-stage", "recompute")


def test_a_slow_device_step_makes_another_choice_better(tmp_path, monkeypatch):
    asked = Request(hardware="h200-one-gpu", words=(*WORDS, "--limit-device-bytes", "16000000000"), fixed=FIXED)
    problem = fit_problem_of(asked)
    winner = problem.search().winner
    assert not winner.setting.optimizer.on_host
    table = problem.costs.of(winner.setting, winner.setting.workload(problem.limits))
    found = {}
    monkeypatch.setattr(fit_again, "calibrate", lambda run, extrapolate: SimpleNamespace(table=found["table"]))
    run: fit_again.RunDir = SimpleNamespace(path=tmp_path)  # type: ignore[assignment]
    assert fit_again.search_again(run) is None  # nobody has asked
    json_files.save(tmp_path / "fit.json", replace(asked, chosen=winner.setting.options(), predicted_us=winner.us))
    found["table"] = table
    same = fit_again.search_again(run)
    assert same is not None and not same.better and "no other settings are certainly faster" in same.text()
    found["table"] = scaled(table, Factors({"optimizer": 2000.0}, 1.0, 1.0))
    other = fit_again.search_again(run)
    assert other is not None and other.better and other.as_json()["another_is_better"]
    assert other.found.fit.winner.setting.optimizer.on_host and "of this run: faster: " in other.text()
