"""What is described and planned on a machine with a GPU is what is described without one, and CUDA stays untouched."""

import os
import sys
from functools import partial

import machine_with_device
import pytest
from planning_cases import WHOLE, make_table, make_workload
from plans import command_line, made_up_table
from training import run

from megatron_ext.cost import cost_table
from megatron_ext.cost.cost_table import Metadata
from megatron_ext.workload import workload as workload_file

MODEL = """--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --micro-batch-size 1
    --global-batch-size 8 --vocab-size 258 --pipeline-model-parallel-size 2 --data-parallel-size 2""".split()


@pytest.fixture(scope="module")
def beside(tmp_path_factory):
    """Environment of processes on the machine with a device."""
    packages = machine_with_device.write(tmp_path_factory.mktemp("packages"))
    return {"PYTHONPATH": os.pathsep.join([packages, os.environ["PYTHONPATH"]]), "CUDA_VISIBLE_DEVICES": "0"}


def command(*words, env):
    # Not by ``training.environment``: the packages come first.
    return run(["env", f"PYTHONPATH={env['PYTHONPATH']}", sys.executable, *map(str, words)], env=env)


def test_the_machine_refuses_what_initialises_cuda(beside):
    result = command("-c", "import torch; torch.zeros(1); torch.cuda.current_device()", env=beside)
    assert "CUDA is initialised" in result.stderr
    result = command("-c", "import transformer_engine", env=beside)
    assert "no CUDA device is visible" in result.stderr


def test_a_description_is_the_same_to_the_byte(megatron_tree, tmp_path, beside):
    def described(name, run, **how):
        words = ["describe", "--out", tmp_path / name, *MODEL, "--transformer-impl", "transformer_engine"]
        result = run(*words, **how)
        assert result.returncode == 0 and "could not be counted" not in result.stderr, result.stderr
        return (tmp_path / name).read_bytes()

    with_device = described("with.json", partial(command, "-m", "megatron_ext"), env=beside)
    assert with_device == described("without.json", command_line)


@pytest.mark.nightly
def test_plans_and_costs_are_the_same_to_the_byte(tmp_path, beside):
    workload = make_workload(microbatches=4, p2p_bytes=4096)
    workload_file.save(tmp_path / "w.json", workload)
    cost_table.save(tmp_path / "t.json", make_table(workload, **WHOLE))
    without = {"PYTHONPATH": os.environ["PYTHONPATH"], "CUDA_VISIBLE_DEVICES": ""}

    def said(env) -> list[str | bytes]:
        files = ["--cost-table", tmp_path / "t.json", "--workload", tmp_path / "w.json"]
        found = []
        for words in (
            ["plan", *files, "--out", tmp_path / "s.json"],
            ["cost", "predict", tmp_path / "t.json", "--route", "gpu", "--bytes", "4000000", "--json"],
        ):
            result = command("-m", "megatron_ext", *words, env=env)
            assert result.returncode == 0, result.stderr
            found.append(result.stdout)
        return [*found, (tmp_path / "s.json").read_bytes()]

    assert said(beside) == said(without)


@pytest.mark.nightly
def test_a_table_is_held_against_the_machine_by_another_process(tmp_path, beside):
    """Which is shown the device, and here fails in asking for its name."""
    path = tmp_path / "T.json"
    metadata = Metadata(hardware={"device": "NVIDIA H200"})
    table = made_up_table()
    cost_table.save(path, type(table)(schema_version=2, kind="cost_table", metadata=metadata, routes=table.routes))
    result = command("-m", "megatron_ext", "cost", "check", path, "--this-machine", env=beside)
    assert result.returncode in (1, 2) and len(result.stderr.strip().splitlines()) == 1, result.stderr


def test_what_is_said_of_this_machine_is_what_the_other_process_says(monkeypatch, tmp_path):
    from megatron_ext.cli import hidden_devices
    from megatron_ext.cpubench import allocator

    monkeypatch.setattr(allocator, "CUDA_DEVICES", (tmp_path,))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    shown = "import json, os; print('of the driver'); print(json.dumps({'shown': os.environ['CUDA_VISIBLE_DEVICES']}))"
    monkeypatch.setattr(hidden_devices, "ASK", shown)
    with hidden_devices.hidden_from(["--json", "plan"]):
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "" and hidden_devices.this_machine() == {"shown": "3"}
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "3"
    with hidden_devices.hidden_from(["measure"]):
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "3"
