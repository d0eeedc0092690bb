"""What is refused from the text of a script's arguments, before anything is imported."""

import sys

import pytest

from megatron_ext.cli import main as cli
from megatron_ext.formats.errors import InputError
from megatron_ext.megatron.cpu_options import refuse_absent_engine
from megatron_ext.megatron.script_arguments import read, refuse_contradictions

ARGUMENTS = (
    "--hidden-size 64 --seq-length=32 --micro-batch-size 2 --pipeline-model-parallel-size 2 --lr 1e-3 --bf16 "
    "--tensor-model-parallel-size 2"
).split()


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    for name in ("WORLD_SIZE", "RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def checkout(tmp_path):
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "pretrain_gpt.py").write_text("raise SystemExit('nothing may run this')\n")
    return tmp_path / "tree"


def test_ours_are_told_from_megatrons_and_sizes_are_read():
    found = read([*ARGUMENTS, "--zero-stage", "3", "--user-defined-schedule", "s.json", "--data-parallel-size", "4"])
    assert found.megatron == ARGUMENTS and found.ours.zero_stage == 3 and found.schedule == "s.json"
    assert (found.sizes.hidden_size, found.sizes.seq_length, found.sizes.micro_batch_size) == (64, 32, 2)
    assert (found.replica_size, found.world_size(), found.data_parallel_size()) == (4, 16, 4)


def test_a_launcher_says_how_many_replicas_there_are(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert read(ARGUMENTS).data_parallel_size() == 2
    monkeypatch.setenv("WORLD_SIZE", "6")
    with pytest.raises(InputError, match="WORLD_SIZE = 6: is no multiple of a replica's 4 ranks"):
        read(ARGUMENTS).data_parallel_size()


def test_what_arguments_of_another_program_do_not_say_is_not_known():
    assert read(["16"], of_megatron=False).sizes.pipeline_model_parallel_size is None
    assert read(["16"]).sizes.pipeline_model_parallel_size == 1


def test_without_a_launcher_the_replicas_have_to_be_given():
    with pytest.raises(InputError, match="--data-parallel-size: is needed"):
        read(ARGUMENTS).data_parallel_size()


@pytest.mark.parametrize("options", [["--hidden-size", "0"], ["--seq-length", "x"], ["--data-parallel-size", "-1"]])
def test_a_size_that_is_none_is_refused_by_name(options):
    with pytest.raises(InputError, match=options[0]):
        read(options)


def test_a_contradiction_names_both():
    refuse_contradictions({"hidden_size": 64, "seq_length": None}, {"hidden_size": 64, "seq_length": 32})
    with pytest.raises(InputError, match="--hidden-size = 128: the script's arguments say --hidden-size 64"):
        refuse_contradictions({"hidden_size": 128}, {"hidden_size": 64})


REFUSED = {
    "contradiction": (["measure", "--out", "OUT", "--hidden-size", "128"], "say --hidden-size 64"),
    "replicas": (["measure", "--out", "OUT", "--dp", "4", "--seconds", "0"], "--seconds: 0.0"),
    "a node": (["measure", "--out", "OUT", "--dp", "64"], "more than 64 ranks on one node"),
    "no replicas": (["prepare", "--out", "OUT"], "--data-parallel-size: is needed"),
    "policy": (["prepare", "--out", "OUT", "--data-parallel-size", "2", "--policy", "fastest"], "fastest"),
    "time": (["prepare", "--out", "OUT", "--data-parallel-size", "2", "--seconds", "0"], "--seconds"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_be_refused_later_is_refused_before_the_script_runs(name, checkout, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "")
    monkeypatch.setattr("sys.path", [*sys.path])
    verb, expected = REFUSED[name]
    command = [str(tmp_path / "out") if word == "OUT" else word for word in verb]
    assert cli.main([*command, "--checkout", str(checkout), "--", *ARGUMENTS]) == 2
    said = capsys.readouterr().err.strip()
    assert expected in said and len(said.splitlines()) == 1


def test_a_directory_without_the_script_is_refused(tmp_path, capsys):
    command = ["measure", "--out", str(tmp_path / "t.json"), "--checkout", str(tmp_path), "--", *ARGUMENTS]
    assert cli.main(command) == 2 and "has no pretrain_gpt.py" in capsys.readouterr().err


def test_plan_takes_a_workload_or_the_scripts_arguments(tmp_path, capsys):
    (tmp_path / "w.json").write_text("{}")
    start = ["plan", "--cost-table", str(tmp_path / "t.json"), "--out", str(tmp_path / "s.json")]
    assert cli.main(start) == 2
    assert cli.main([*start, "--workload", "w.json", "--checkout", str(tmp_path)]) == 2
    said = capsys.readouterr().err.splitlines()
    assert "--workload: is needed" in said[0] and "give one" in said[1]


def test_run_on_cpu_asks_for_what_it_can_run(tmp_path, capsys):
    script = tmp_path / "pretrain_gpt.py"
    script.write_text("raise SystemExit('nothing may run this')\n")
    assert cli.main(["run-on-cpu", "--", str(script), *ARGUMENTS]) == 2
    local = [*ARGUMENTS, "--transformer-impl", "local"]
    assert cli.main(["run-on-cpu", "--nproc", "3", "--", str(script), *local]) == 2
    assert cli.main(["run-on-cpu", "--", str(tmp_path / "absent.py"), *local]) == 2
    said = capsys.readouterr().err.splitlines()
    assert "--transformer-impl local" in said[0] and "--nproc = 3" in said[1] and "no such file" in said[2]
    refuse_absent_engine("local")
