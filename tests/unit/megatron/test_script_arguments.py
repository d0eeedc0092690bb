"""What is refused from the text of a script's arguments, before anything is imported."""

import sys

import msgspec
import pytest
import toy_megatron
from planning_cases import make_table, make_workload

from megatron_ext import planner
from megatron_ext.cli import main as cli
from megatron_ext.cli.checkout_model import refuse_script
from megatron_ext.cost import cost_table
from megatron_ext.cost.cost_table import Metadata
from megatron_ext.cost.environment import size_differences
from megatron_ext.formats.errors import InputError
from megatron_ext.megatron.script_arguments import read, refuse_absent_engine, refuse_contradictions
from megatron_ext.schedule import user_defined_schedule

ARGUMENTS = (
    "--hidden-size 64 --seq-length=32 --micro-batch-size 2 --pipeline-model-parallel-size 2 --lr 1e-3 --bf16 "
    "--tensor-model-parallel-size 2 --num-layers 4 --num-attention-heads 4 --use-distributed-optimizer "
    "--overlap-param-gather --transformer-impl local"
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


def test_options_of_a_run_are_not_passed_on_to_megatron():
    """The parser of a checkout that is not patched does not know them."""
    found = read([*ARGUMENTS, "--user-defined-schedule-step-timeout", "60", "--delayed-parameter-update", "2"])
    assert found.megatron == ARGUMENTS and found.ours.delayed_parameter_update == 2


def test_a_launcher_says_how_many_replicas_there_are(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert read(ARGUMENTS).data_parallel_size() == 2
    monkeypatch.setenv("WORLD_SIZE", "6")
    with pytest.raises(InputError, match="WORLD_SIZE = 6: is no .* replica's 4 ranks .*give --data-parallel-size"):
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
    "replicas": (["measure", "--out", "OUT", "--dp", "4", "--seconds", "0"], "--seconds = 0.0"),
    "a node": (["measure", "--out", "OUT", "--dp", "64"], "more than 64 ranks on one node"),
    "no replicas": (["prepare", "--out", "OUT"], "--data-parallel-size: is needed"),
    "policy": (["prepare", "--out", "OUT", "--data-parallel-size", "2", "--policy", "fastest"], "fastest"),
    "time": (["prepare", "--out", "OUT", "--data-parallel-size", "2", "--seconds", "0"], "--seconds"),
    "a drive": (["prepare", "--out", "OUT", "--dp", "2", "--nvme-path", "/dev/null/drive"], "--nvme-path"),
    "memory": (
        ["prepare", "--out", "OUT", "--dp", "2", "--nvme-path", "/dev/shm"],
        "is on tmpfs, which is memory, not a",
    ),
    "beside, prepare": (["prepare", "--out", "OUT", "--seq-length", "64"], "= '64': the script's arguments say --seq"),
    "beside, describe": (["describe", "--out", "OUT", "--num-layers", "8"], "arguments say --num-layers 4"),
    "beside, plan": (["plan", "--out", "OUT", "--cost-table", "T", "--hidden-size", "8"], "say --hidden-size 64"),
    "short form": (["measure", "--out", "OUT", "--pp", "4"], "--pipeline-model-parallel-size = '4'"),
    "unknown, prepare": (["prepare", "--out", "OUT", "--secnds", "3"], "--secnds: is not an option of prepare"),
    "unknown, measure": (["measure", "--out", "OUT", "--zero-stages", "3"], "is not an option of measure"),
    "policy of plan": (["plan", "--out", "OUT", "--cost-table", "T", "--policy", "best"], "best"),
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


def test_layers_that_would_be_timed_need_an_engine_or_none():
    with pytest.raises(InputError, match="train with --transformer-impl local"):
        refuse_script(read(ARGUMENTS[:-2]), "prepare")
    refuse_script(read(ARGUMENTS[:-2]), "describe")


def test_a_table_of_other_messages_is_refused_before_the_script_runs(checkout, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "")
    monkeypatch.setattr("sys.path", [*sys.path])
    sizes = {"world_sizes": {"data_parallel_size": 2}, "model": {"seq_length": 128}}
    metadata = Metadata(**sizes)
    found = size_differences(metadata, {"data_parallel_size": 2, "seq_length": 32, "hidden_size": 64, "lr": None})
    assert found == ["model.seq_length: table 128, here 32"]
    assert not size_differences(Metadata(synthetic=True, **sizes), {"seq_length": 32})
    table = tmp_path / "t.json"
    cost_table.save(table, msgspec.structs.replace(make_table(make_workload()), metadata=metadata))
    command = ["plan", "--checkout", str(checkout), "--cost-table", str(table), "--out", str(tmp_path / "s.json")]
    assert cli.main([*command, "--dp", "2", "--", *ARGUMENTS]) == 2
    assert "model.seq_length: table 128, here 32" in capsys.readouterr().err


def test_fit_takes_a_whole_command_line_without_megatron(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "megatron.core", None)
    others = "--tokenizer-type NullTokenizer --vocab-size 1023 --mock-data --an-option-of-a-fork 3"
    command = ["fit", "--hardware", "h100-rdma", "--fix", "all", "--json", "--", *ARGUMENTS, *others.split()]
    assert cli.main(command) == 0, capsys.readouterr().err
    assert "ignored: --an-option-of-a-fork" in capsys.readouterr().err
    assert cli.main([*command, "--hidden-sice", "64"]) == 2
    assert "did you mean --hidden-size?" in capsys.readouterr().err


def test_run_on_cpu_says_at_once_what_every_rank_would_say_later(tmp_path, capsys):
    tree, schedule = tmp_path / "tree", tmp_path / "s.json"
    toy_megatron.write(tree)
    work = make_workload(pp=2, vp=1, dp=2, layers=2, microbatches=4, order="1f1b")
    work = msgspec.structs.replace(work, parallel=msgspec.structs.replace(work.parallel, tensor_model_parallel_size=2))
    user_defined_schedule.save(schedule, planner.plan(work, make_table(work), policy="all-gpu"))
    command = ["run-on-cpu", "--", str(tree / "pretrain_gpt.py"), *ARGUMENTS, "--user-defined-schedule", str(schedule)]
    assert cli.main(command) == 2
    assert "has no hooks yet; run `megatron-ext patch apply" in capsys.readouterr().err
    assert cli.main(["run-on-cpu", "--nproc", "4", *command[1:]]) == 2
    assert capsys.readouterr().err == "megatron-ext: --nproc = 4: the schedule is for 8 ranks\n"
    option = "--pipeline-model-parallel-size"
    assert cli.main([*command, option, "4"]) == 2
    said = f"parallel.pipeline_model_parallel_size = 2: the script's arguments say 4 ({option})\n"
    assert capsys.readouterr().err.endswith(f"s.json: {said}")


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
    local = ARGUMENTS
    assert cli.main(["run-on-cpu", "--", str(script), *local[:-2]]) == 2
    assert cli.main(["run-on-cpu", "--nproc", "3", "--", str(script), *local]) == 2
    assert cli.main(["run-on-cpu", "--", str(tmp_path / "absent.py"), *local]) == 2
    assert cli.main(["run-on-cpu", "--", str(script), "--user-defined-schedule", "s.json"]) == 2
    assert cli.main(["run-on-cpu", "--", str(script), *local, "--user-defined-schedule-check", "r.json"]) == 2
    said = capsys.readouterr().err.splitlines()
    assert "--transformer-impl local" in said[0] and "--nproc = 3" in said[1] and "no such file" in said[2]
    assert said[3] == "megatron-ext: SCRIPT_ARGUMENTS: none are given; give the arguments of pretrain_gpt.py after --"
    assert said[4:] == ["megatron-ext: --user-defined-schedule-check = 'r.json': needs --user-defined-schedule"]
    refuse_absent_engine("local")
