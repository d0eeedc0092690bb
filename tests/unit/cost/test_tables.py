"""Combining, comparing, showing and checking the environment of cost tables."""

import json

import pytest

from megatron_ext.cli import main as cli
from megatron_ext.cost import cost_table, cost_table_text
from megatron_ext.cost.combine_tables import combine
from megatron_ext.cost.compare_tables import compare, text
from megatron_ext.cost.cost_table import (
    Compute,
    Contention,
    CostTable,
    Curve,
    GroupOverhead,
    Metadata,
    Point,
    Routes,
    Topology,
    check,
)
from megatron_ext.cost.environment import differences, refuse, run_differences, world_sizes
from megatron_ext.cost.host_cpu import HostCpu
from megatron_ext.formats.errors import InputError
from megatron_ext.workload import workload
from megatron_ext.workload.parallel import Parallel


def curve(rate=1.0, **algorithms):
    points = tuple(Point(size_bytes=1 << power, p50_us=(10 + (1 << power) / 1e4) * rate) for power in range(12, 24))
    return Curve(
        points=points if not algorithms else (),
        algorithms={
            name: tuple(p.__class__(size_bytes=p.size_bytes, p50_us=p.p50_us * factor) for p in points)
            for name, factor in algorithms.items()
        },
    )


def table(**fields):
    return check(CostTable(schema_version=2, kind="cost_table", **fields))


CLUSTER = table(routes=Routes(gpu=curve()), metadata=Metadata(hardware={"device": "H200"}, notes=("a note",)))
ONE_GPU = table(
    routes=Routes(gpu=curve(2.0), cpu=curve(3.0)),
    compute=(Compute(layer_kind="transformer", forward_us=1, backward_us=2),),
    contention=(Contention(measured="gpu", busy="cpu", slowdown=1.1, size_bytes=4096),),
    metadata=Metadata(hardware={"device": "A100"}, synthetic=True),
)


def test_combine_takes_each_part_from_the_first_that_has_it():
    both = combine({"cluster": CLUSTER, "gpu": ONE_GPU})
    assert both.routes.gpu == CLUSTER.routes.gpu and both.routes.cpu == ONE_GPU.routes.cpu
    assert both.compute == ONE_GPU.compute and both.contention == ONE_GPU.contention
    parts = both.metadata.source.parts
    assert parts["routes.gpu"] == "cluster" and parts["compute"] == "gpu"
    assert both.metadata.hardware == {"device": "H200"} and both.metadata.synthetic
    assert "cluster: a note" in both.metadata.notes and any("A100" in note for note in both.metadata.notes)


def test_combine_as_chosen():
    both = combine({"cluster": CLUSTER, "gpu": ONE_GPU}, {"links": "gpu"})
    assert both.routes.gpu == ONE_GPU.routes.gpu
    both = combine({"gpu": ONE_GPU, "cluster": CLUSTER}, {"routes.gpu": "cluster"})
    assert both.routes.gpu == CLUSTER.routes.gpu
    with pytest.raises(InputError, match="cluster: compute: has none"):
        combine({"cluster": CLUSTER, "gpu": ONE_GPU}, {"compute": "cluster"})
    with pytest.raises(InputError, match="known parts"):
        combine({"cluster": CLUSTER}, {"routes.warp": "cluster"})


def test_combine_joins_algorithms():
    ring, tree = table(all_reduce=curve(ring=1.0)), table(all_reduce=curve(tree=0.5, ring=9.0))
    algorithms = combine({"a": ring, "b": tree}).all_reduce.algorithms
    assert set(algorithms) == {"ring", "tree"} and algorithms["ring"] == ring.all_reduce.algorithms["ring"]


def test_compare_says_what_changed_and_by_how_much():
    changes = compare(CLUSTER, ONE_GPU)
    gpu = changes["curves"]["routes.gpu"]
    assert gpu["median"] == pytest.approx(1.0) and gpu["largest"] == pytest.approx(1.0) and gpu["sizes"] == 12
    assert len(gpu["beyond"]) == 12  # no interval explains a factor of two on a smooth curve
    assert changes["only"]["second"] == ["routes.cpu", "contention", "compute"]
    assert changes["environment"] == ["hardware.device: H200 -> A100"]
    assert "+100.0% median" in text(changes)
    same = compare(ONE_GPU, ONE_GPU)
    assert same["curves"]["routes.gpu"]["largest"] == 0 and not same["curves"]["routes.gpu"]["beyond"]
    assert same["compute"] == {"transformer": 0} and same["contention"] == {"gpu beside cpu, 4096 bytes": 0}


def test_compare_says_all_sizes_of_a_pair_and_single_figures():
    def made(slowdowns, call_us, processors):
        rows = tuple(
            Contention(measured="gpu", busy="cpu", slowdown=slowdown, size_bytes=size) for size, slowdown in slowdowns
        )
        return table(
            contention=rows,
            group_overhead=GroupOverhead(call_us=call_us),
            topology=Topology(nic_shares_pcie=True),
            host_cpu=HostCpu(processors_per_node=processors),
        )

    changes = compare(made(((1024, 1.0), (4096, 2.0)), 10.0, 2.0), made(((1024, 1.5), (4096, 2.0)), 100.0, 1.0))
    assert changes["contention"] == {"gpu beside cpu, 1024 bytes": 0.5, "gpu beside cpu, 4096 bytes": 0}
    assert changes["figures"] == {"group_overhead.call_us": 9.0, "host_cpu.processors_per_node": -0.5}
    assert "group_overhead.call_us" in text(changes) and "+900.0%" in text(changes)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"contention": (Contention(measured="gpu", busy="h2d", slowdown=3),)},
            r"contention\[0\].busy = 'h2d': known: compute, gpu, cpu",
        ),
        (
            {"contention": (Contention(measured="gpu", busy="cpu", slowdown=3, size_bytes=-1),)},
            r"contention\[0\].size_bytes = -1: must not be negative",
        ),
        (
            {"routes": Routes(cpu=Curve(points=(Point(size_bytes=1, p50_us=1, issued_us=-1.0),)))},
            r"routes.cpu.points\[0\].issued_us = -1.0: must be a positive",
        ),
        (
            {"routes": Routes(gpu=Curve(points=(Point(size_bytes=1, p50_us=1), Point(size_bytes=2, p50_us=1e-308))))},
            r"routes.gpu.points\[1\].p50_us = 1e-308: no plausible time: expected 1e-12 to",
        ),
        (
            {"p2p": Curve(points=(Point(size_bytes=2, p50_us=0.9), Point(size_bytes=1, p50_us=1e3)))},
            r"p2p.points\[0\].p50_us = 0.9: no plausible time: less than 1/1000 of the 1000 us that 1 bytes take",
        ),
        (
            {"compute": (Compute(layer_kind="a", forward_us=1e15, backward_us=1),)},
            r"compute\[0\].forward_us = 1000000000000000.0: no plausible time",
        ),
        (
            {"contention": (Contention(measured="gpu", busy="cpu", slowdown=1e-300),)},
            r"contention\[0\].slowdown = 1e-300: no plausible slowdown",
        ),
    ],
)
def test_figures_that_would_be_passed_over_are_refused(fields, message):
    with pytest.raises(InputError, match=message):
        table(**fields)


def test_tensor_parallel_ranks_are_not_counted():
    """A table is measured by one rank of every tensor-parallel group."""

    def differing(measured_on: int, **sizes):
        parallel = Parallel(
            num_microbatches=4, order="no_pipeline" if sizes["pipeline_model_parallel_size"] == 1 else "1f1b", **sizes
        )
        work = workload.Workload(
            schema_version=2,
            kind="workload",
            parallel=parallel,
            zero_stage=1,
            chunks=(),
            p2p_bytes=4 * 128 * 64 if parallel.pp > 1 else 0,
        )
        there = {
            "data_parallel_size": parallel.dp,
            "pipeline_model_parallel_size": parallel.pp,
            "ranks_per_node": measured_on,
        }
        model_of = {"dtype": "float32", "seq_length": 128, "micro_batch_size": 1, "hidden_size": 64}
        return run_differences(Metadata(world_sizes=there, model=model_of), work)

    nodes = dict(tensor_model_parallel_size=8, data_parallel_size=8, pipeline_model_parallel_size=1, gpus_per_node=8)
    assert differing(1, **nodes) == []  # eight nodes, one rank of each group on a node
    half = dict(tensor_model_parallel_size=2, data_parallel_size=8, pipeline_model_parallel_size=1, gpus_per_node=8)
    assert differing(8, **half) == ["world_sizes.ranks_per_node: table 8, here 4"] and differing(4, **half) == []
    # Without sequence parallelism every rank sends the whole message.
    assert differing(4, tensor_model_parallel_size=2, data_parallel_size=2, pipeline_model_parallel_size=2) == []


def test_environment():
    parallel = Parallel(
        pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2, data_parallel_size=2, num_microbatches=4
    )
    here = {"hardware": {"device": "H200"}, "software": {"torch": "2.6.0"}, "world_sizes": world_sizes(parallel)}
    measured = Metadata(**here)
    assert differences(measured, here) == []
    other = Metadata(
        hardware={"device": "A100"},
        software={"torch": "2.6.0"},
        world_sizes={"data_parallel_size": 4, "pipeline_model_parallel_size": 2, "ranks_per_node": 4},
    )
    assert differences(other, here) == [
        "hardware.device: table A100, here H200",
        "world_sizes.data_parallel_size: table 4, here 2",
    ]
    assert differences(Metadata(), here)[0] == "hardware.device: the table does not say, here H200"
    assert differences(Metadata(synthetic=True, **here), here) == ["synthetic: the table was not measured"]
    with pytest.raises(
        InputError,
        match="T.json: metadata: was measured in another environment .hardware.device: table A100, here H200",
    ):
        refuse(differences(other, here), allow=False, file="T.json")
    assert refuse(differences(other, here), allow=True) == differences(other, here)


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
    arguments = [
        "cost",
        "check",
        str(tmp_path / "T.json"),
        "--workload",
        str(tmp_path / "W.json"),
        "--this-machine",
        "--json",
    ]
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


def test_show_verb_with_plot(path, tmp_path, capsys):
    plot = tmp_path / "curves.png"
    assert cli.main(["cost", "show", path, "--plot", str(plot)]) == 0
    assert plot.read_bytes().startswith(b"\x89PNG")
    shown = capsys.readouterr().out
    assert "SYNTHETIC" in shown and "routes.cpu" in shown and "gpu      beside cpu        1.10" in shown
    assert cli.main(["cost", "show", path, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["curves"]["routes.gpu"]["points"] == 12
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["T.json", "curves.png"]


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


def test_roughness_names_the_largest_miss():
    points = (Point(size_bytes=1, p50_us=1), Point(size_bytes=2, p50_us=4), Point(size_bytes=3, p50_us=3))
    assert cost_table_text.roughness(points) == pytest.approx(0.5)
    assert cost_table_text.roughness(points[:2]) is None
