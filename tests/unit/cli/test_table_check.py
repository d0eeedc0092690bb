"""A table measured for another run is refused by name unless allowed; one that does not say is used."""

import json

import msgspec
import pytest
from planning_cases import WHOLE, make_table, make_workload

from megatron_ext import planner
from megatron_ext.cli import main as cli
from megatron_ext.cost import cost_table as cost
from megatron_ext.cost.combine_tables import combine
from megatron_ext.cost.environment import world_sizes
from megatron_ext.runtime.machine import environment
from megatron_ext.schedule import user_defined_schedule as schedule
from megatron_ext.workload import workload
from megatron_ext.workload.drive_reads import DriveReads

WORK = make_workload(p2p_bytes=4096)
TABLE = make_table(WORK, **WHOLE)
MODEL = {"hidden_size": 64, "seq_length": 16, "micro_batch_size": 2, "dtype": "bfloat16"}


@pytest.fixture
def run(tmp_path, capsys):
    """``run(verb, metadata, *options)``: exit code, standard output and error with a table of that metadata."""

    def run(verb: str, metadata: cost.Metadata, *options: str, table=TABLE):
        workload.save(tmp_path / "w.json", WORK)
        cost.save(tmp_path / "t.json", msgspec.structs.replace(table, metadata=metadata))
        arguments = [
            verb,
            "--cost-table",
            str(tmp_path / "t.json"),
            "--workload",
            str(tmp_path / "w.json"),
            "--json",
            *options,
        ]
        if verb == "plan":
            arguments += ["--out", str(tmp_path / "s.json")]
        capsys.readouterr()
        return cli.main(arguments), *capsys.readouterr()

    run.schedule = tmp_path / "s.json"
    return run


OTHER = {
    "world_sizes.data_parallel_size: table 8, here 2": cost.Metadata(world_sizes={"data_parallel_size": 8}),
    "world_sizes.pipeline_model_parallel_size: table 1, here 2": cost.Metadata(
        world_sizes=world_sizes(WORK.parallel) | {"pipeline_model_parallel_size": 1}
    ),
    "world_sizes.ranks_per_node: table 2, here 4": cost.Metadata(
        world_sizes=world_sizes(WORK.parallel) | {"ranks_per_node": 2}
    ),
    "model.dtype: table float32, here bfloat16": cost.Metadata(model=MODEL | {"dtype": "float32", "seq_length": 8}),
    "model: table 16 x 1 x 64 (sequence x micro-batch x hidden), 2048 bytes per message, here 4096": cost.Metadata(
        model=MODEL | {"micro_batch_size": 1}
    ),
}


@pytest.mark.parametrize("verb", ["plan", "simulate"])
@pytest.mark.parametrize("line", OTHER)
def test_a_table_of_another_run_is_refused_unless_allowed(run, verb, line):
    code, out, error = run(verb, OTHER[line])
    assert code == 2 and out == "" and error.count("\n") == 1
    assert (
        "t.json: metadata: was measured in another environment" in error
        and line in error
        and "--allow-differences" in error
    )
    code, out, error = run(verb, OTHER[line], "--allow-differences")
    assert code == 0 and line in error
    if verb == "plan":
        assert json.loads(out)["differences"] == [line]


def test_layers_are_not_placed_by_the_costs_of_another_model(run):
    """If its table is right, this workload is refused because it has no kinds of layers."""
    other = cost.Metadata(model=MODEL | {"micro_batch_size": 1})
    code, out, error = run("balance", other)
    assert code == 2 and out == "" and "model: table 16 x 1 x 64" in error and "allow it with --allow-diff" in error
    for metadata, *options in ((cost.Metadata(),), (other, "--allow-differences")):
        code, _, error = run("balance", metadata, *options)
        assert code == 2 and "allow it with" not in error and "layer_kinds" in error


@pytest.mark.parametrize(
    "metadata",
    [
        cost.Metadata(),
        cost.Metadata(world_sizes=world_sizes(WORK.parallel), model=MODEL),
        cost.Metadata(model={"hidden_size": 9}),
        cost.Metadata(world_sizes={"nodes": 3}, source=cost.Source(program="curves")),
        cost.Metadata(synthetic=True, world_sizes={"data_parallel_size": 99}),
        cost.Metadata(hardware={"processor": "of a cluster"}, software={"torch": "0.1"}),  # planned on a laptop
    ],
)
def test_what_a_table_does_not_say_is_not_held_against_it(run, metadata):
    code, out, error = run("plan", metadata)
    assert code == 0, error
    assert json.loads(out)["differences"] == []


def test_this_machine_is_compared_only_where_that_is_asked_for(run):
    cluster = cost.Metadata(**environment() | {"hardware": {"processor": "of a cluster"}})
    assert run("plan", cluster)[0] == 0
    code, _, error = run("plan", cluster, "--this-machine")
    assert code == 2 and "hardware.processor: table of a cluster, here" in error
    assert run("plan", cluster, "--this-machine", "--allow-differences")[0] == 0
    assert run("plan", cost.Metadata(**environment()), "--this-machine")[0] == 0


def test_a_combined_table_says_of_which_model_its_compute_is(run):
    links = msgspec.structs.replace(TABLE, compute=(), metadata=cost.Metadata(world_sizes=world_sizes(WORK.parallel)))
    gpu = msgspec.structs.replace(TABLE, metadata=cost.Metadata(model=MODEL | {"dtype": "float16"}))
    both = combine({"links": links, "gpu": gpu})
    assert both.metadata.world_sizes == links.metadata.world_sizes and both.metadata.model == gpu.metadata.model
    code, _, error = run("plan", both.metadata, table=both)
    assert code == 2 and "model.dtype: table float16, here bfloat16" in error


def test_a_schedule_says_on_what_its_costs_were_measured(run):
    facts = environment()
    assert run("plan", cost.Metadata(**facts))[0] == 0
    assert schedule.read_unchecked(run.schedule).metadata.options.measured_on == schedule.MeasuredOn(**facts)
    assert run("plan", cost.Metadata(synthetic=True, **facts))[0] == 0
    assert schedule.read_unchecked(run.schedule).metadata.options.measured_on is None


def test_a_run_reads_the_drive_as_it_was_measured_best(run):
    with_drive = make_table(WORK, nvme=(1.0, 1e5), **WHOLE)
    best = DriveReads(block_bytes=8192, queue_depth=16)
    nvme = msgspec.structs.replace(with_drive.routes.nvme, reads=best)
    table = msgspec.structs.replace(with_drive, routes=msgspec.structs.replace(with_drive.routes, nvme=nvme))
    given = msgspec.structs.replace(WORK, limits=workload.Limits(nvme_slots=4))
    planned = planner.plan(given, table, policy="random:1")
    assert any("nvme" in entry.to for entry in planned.publish)
    assert planned.metadata.options.nvme == best
