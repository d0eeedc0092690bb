"""The verbs of ``megatron-ext cost``."""

import json

import pytest
from parallel_sizes import sized
from two_tables import CLUSTER, ONE_GPU, table

from megatron_ext.cli import main as cli
from megatron_ext.cost import cost_table, cost_table_text
from megatron_ext.cost.cost_table import Metadata
from megatron_ext.cost.environment import world_sizes
from megatron_ext.formats.errors import InputError
from megatron_ext.workload import workload
from megatron_ext.workload.gpt_shapes import GptShape, MicroBatch, gpt_workload
from megatron_ext.workload.parallel import Parallel


def test_check_verb(tmp_path, capsys):
    from megatron_ext.runtime.machine import environment

    parallel = Parallel(
        pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2, data_parallel_size=2, num_microbatches=4
    )
    workload.save(
        tmp_path / "W.json",
        workload.Workload(schema_version=2, kind="workload", parallel=parallel, zero_stage=1, chunks=()),
    )
    cost_table.save(tmp_path / "T.json", table(metadata=Metadata(**environment(), world_sizes=world_sizes(parallel))))
    arguments = f"cost check {tmp_path}/T.json --workload {tmp_path}/W.json --this-machine --json".split()
    assert cli.main(arguments) == 0 and json.loads(capsys.readouterr().out) == {"differences": []}
    cost_table.save(
        tmp_path / "T.json",
        table(metadata=Metadata(**environment(), world_sizes=world_sizes(parallel) | {"data_parallel_size": 8})),
    )
    assert cli.main(arguments) == 2
    assert "world_sizes.data_parallel_size: table 8, here 2" in capsys.readouterr().err
    assert cli.main([*arguments, "--allow-differences"]) == 0
    assert json.loads(capsys.readouterr().out)["differences"] == ["world_sizes.data_parallel_size: table 8, here 2"]
    assert cli.main(["cost", "check", str(tmp_path / "T.json")]) == 2
    # A synthetic table is of no machine, but `plan` accepts it for this run.
    cost_table.save(tmp_path / "T.json", table(metadata=Metadata(synthetic=True, world_sizes=world_sizes(parallel))))
    assert cli.main([word for word in arguments if word != "--this-machine"]) == 0
    assert cli.main(arguments) == 2 and "synthetic: the table was not measured" in capsys.readouterr().err


@pytest.fixture
def path(tmp_path):
    cost_table.save(tmp_path / "T.json", ONE_GPU)
    return str(tmp_path / "T.json")


def test_predict_verb(path, capsys):
    assert cli.main(["cost", "predict", path, "--route", "gpu", "--bytes", "10000", "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert set(figures) == {"us", "low_us", "high_us"}
    assert figures["us"] == pytest.approx(2 * (10 + 1)) and figures["low_us"] <= figures["us"] <= figures["high_us"]
    assert cli.main(["cost", "predict", path, "--route", "gpu", "--bytes", "10000", "--busy", "cpu", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["us"] == pytest.approx(1.1 * figures["us"])


@pytest.mark.parametrize(
    "arguments",
    [
        ["--route", "gpu", "--bytes", "1"],
        ["--route", "gpu", "--bytes", "-5", "--extrapolate"],
        ["--route", "nvme", "--bytes", "10000"],
        ["--route", "warp", "--bytes", "10000"],
        ["--route", "gpu", "--bytes", "10000", "--busy", "nvme"],
        ["--route", "gpu", "--bytes", "10000", "--groups", "0"],
        ["--route", "p2p", "--bytes", "10000"],
    ],
)
def test_predict_verb_refuses(path, arguments, capsys):
    assert cli.main(["cost", "predict", path, *arguments]) == 2
    assert len(capsys.readouterr().err.strip().split("\n")) == 1


def test_show_verb(path, tmp_path, capsys):
    assert cli.main(["cost", "show", path]) == 0
    shown = capsys.readouterr().out
    assert "SYNTHETIC" in shown and "routes.cpu" in shown and "gpu      while cpu      is busy   1.10" in shown
    assert cli.main(["cost", "show", path, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["curves"]["routes.gpu"]["points"] == 12
    assert [entry.name for entry in tmp_path.iterdir()] == ["T.json"]


def test_combine_and_compare_verbs(path, tmp_path, capsys):
    cost_table.save(tmp_path / "cluster.json", CLUSTER)
    out = tmp_path / "both.json"
    assert (
        cli.main(["cost", "combine", f"links={tmp_path / 'cluster.json'}", f"compute={path}", "--out", str(out)]) == 0
    )
    both = cost_table.load(out)
    assert both.routes.gpu == CLUSTER.routes.gpu and both.compute == ONE_GPU.compute
    capsys.readouterr()
    assert cli.main(["cost", "compare", path, str(out), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["curves"]["routes.gpu"]["median"] == pytest.approx(-0.5)


@pytest.mark.parametrize("size", [-5, 10**25, 10**400], ids=["negative", "huge", "no float"])
def test_predict_refuses_sizes_that_no_group_has(size):
    with pytest.raises(InputError, match=r"^--bytes: .*(negative|not a plausible size)"):
        cost_table_text.predicted(ONE_GPU, "gpu", size, extrapolate=True)


def test_estimate_verb_divides_a_sequence(tmp_path):
    """Context-parallel ranks take half of the time of whole sequences, and more than those of half sequences."""
    shape = GptShape(2, 4096, 16384, 32, 32, 32000, 128)
    parallel = sized(dp=8, microbatches=1, gpus_per_node=8)

    def forward_us(*sizes: str) -> float:
        out, parts = str(tmp_path / "T.json"), int(sizes[3]) if sizes[3:] else 1
        batch = MicroBatch(int(sizes[1]), context_parallel=parts)
        workload.save(tmp_path / "W.json", gpt_workload(shape, parallel, batch, zero_stage=3))
        arguments = ["--hardware", "h100-nvlink", "--workload", str(tmp_path / "W.json"), "--out", out, *sizes]
        assert cli.main(["cost", "estimate", *arguments]) == 0
        return next(row.forward_us for row in cost_table.load(out).compute if row.layer_kind == "transformer")

    whole, half = forward_us("--seq-length", "32768"), forward_us("--seq-length", "16384")
    parts = forward_us("--seq-length", "32768", "--context-parallel-size", "2")
    assert parts == pytest.approx(whole / 2, rel=0.01) and parts > 1.1 * half


def test_estimate_takes_the_options_of_a_launch_script(tmp_path, capsys):
    shape = GptShape(2, 2048, 8192, 16, 16, 1024, 128, tied=False)
    workload.save(
        tmp_path / "w.json", gpt_workload(shape, sized(dp=8, microbatches=1, gpus_per_node=8), MicroBatch(4096, 2))
    )

    def estimated(*words: str):
        files = ["--hardware", "h100-nvlink", "--workload", str(tmp_path / "w.json"), "--out", str(tmp_path / "t.json")]
        assert cli.main(["cost", "estimate", *files, *words]) == 0, capsys.readouterr().err
        assert len(capsys.readouterr().out.splitlines()) < 5  # the curves are those of `cost show`
        return {row.layer_kind: row for row in cost_table.load(tmp_path / "t.json").compute}["transformer"]

    selective = ["--seq-length", "4096", "--micro-batch-size", "2", "--recompute-granularity", "selective"]
    script = ["--num-layers", "2", "--num-attention-heads", "16", "--bf16", *selective]
    assert estimated("--", *script) == estimated(*selective)
    unfused = estimated("--", *script, "--attention-backend", "unfused")
    assert unfused.forward_us > estimated("--", *script).forward_us
    mlp = estimated("--", *script, "--recompute-modules", "core_attn", "mlp")
    assert mlp == estimated(*selective, "--recompute-modules", "core_attn", "mlp")
    assert mlp.backward_us > estimated(*selective).backward_us
    capsys.readouterr()
    for words, said in (
        (["--", *script[:4]], "--seq-length: is needed"),
        ([], "--seq-length: is needed"),
        ([*selective, "--context-parallel-size", "0"], "--context-parallel-size = 0: expected 1 or more"),
        ([*selective, "--micro-batchsize", "2"], "did you mean --micro-batch-size?"),
        (
            [*selective, "--recompute-modules", "core_attn,mlp"],
            "--recompute-modules = 'core_attn,mlp': known modules: ",
        ),
    ):
        files = ["--hardware", "h100-nvlink", "--workload", str(tmp_path / "w.json"), "--out", str(tmp_path / "t.json")]
        assert cli.main(["cost", "estimate", *files, *words]) == 2
        assert said in capsys.readouterr().err
