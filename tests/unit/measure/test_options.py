"""Values of ``measure`` beyond any machine are refused in one line; threads are those of a run."""

import os

import pytest
import torch
from msgspec.structs import replace
from parallel_sizes import sized

from megatron_ext.cli import main as cli
from megatron_ext.formats.errors import InputError
from megatron_ext.measure import measure
from megatron_ext.measure.options import Options

HUGE = 10**25


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, HUGE) for name in ("max_bytes", "max_rank_bytes", "hidden_size", "seq_length")),
        ("also_sizes", (512, HUGE)),
        *((name, HUGE) for name in ("threads", "seconds", "data_parallel_size", "pipeline_model_parallel_size")),
    ],
)
def test_a_value_beyond_any_machine_is_refused(name, value):
    assert Options().check()
    with pytest.raises(InputError, match=r"^--[a-z-]+ = .*(memory of \d+ bytes|must be at most|more than 64 ranks)"):
        Options(**{name: value}).check()


def test_threads_are_those_of_a_run(monkeypatch):
    """On a GPU the host's step takes all processors, whatever the environment says: measured with one thread it was
    four times as long on an H200."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(16)))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert Options().rank_threads == 1 and Options(threads=3).rank_threads == 3
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert Options(data_parallel_size=2).rank_threads == 2
    monkeypatch.setattr(Options, "uses_cuda", lambda self: True)
    assert Options(data_parallel_size=1).rank_threads == 14 and Options(data_parallel_size=4).rank_threads == 4
    assert Options(data_parallel_size=8, ranks_per_node=4).rank_threads == 4
    assert Options(data_parallel_size=1, tensor_model_parallel_size=4).rank_threads == 4


@pytest.mark.parametrize("given", [None, 3])
def test_on_a_device_a_rank_finds_its_threads_itself_once_it_is_bound(monkeypatch, given):
    """Four GPUs on one of two NUMA nodes: a quarter of all cores would be twice what a rank of them has."""
    asked = []
    monkeypatch.setattr(Options, "uses_cuda", lambda self: True)
    monkeypatch.setattr(
        "megatron_ext.measure.local_launch.run", lambda options: asked.append(options) or {"threads": 14}
    )
    monkeypatch.setattr("megatron_ext.measure.assemble_table.assemble_table", lambda options, raw: options.threads)
    for name in ("RANK", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    assert measure(Options(data_parallel_size=4, threads=given)) == 14 and asked[0].threads == given


def test_a_missing_package_that_training_needs_is_said_before_measuring(monkeypatch, capsys):
    monkeypatch.setattr(Options, "uses_cuda", lambda self: True)
    monkeypatch.setattr(torch.version, "cuda", "12.6")
    # NVIDIA's cuda-pathfinder lies in ``cuda`` as well, and comes with other packages.
    monkeypatch.setattr("megatron_ext.measure.util.find_spec", lambda name: name == "cuda" or None)
    monkeypatch.setattr("megatron_ext.measure.local_launch.run", lambda options: None)
    for name in ("RANK", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    assert measure(Options(data_parallel_size=1)) is None
    assert 'pip install "cuda-bindings==12.*"' in capsys.readouterr().err
    monkeypatch.setenv("RANK", "1")
    assert measure(Options(data_parallel_size=1)) is None and capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("link", "how"),
    [("compute", "arguments after --, or --modules"), ("nvme", "--nvme-path"), ("device_step", "--optimizer-on-host")],
)
def test_a_link_that_is_chosen_without_what_it_is_measured_by_is_refused(link, how):
    with pytest.raises(InputError, match=f"^--links = '{link}': needs .*{how}"):
        Options(links=("gpu", link)).check(chosen=True)
    assert Options(links=("gpu", "compute", "contention")).check(chosen=True)  # products of matrices stand for compute


def test_measure_refuses_compute_without_layers(tmp_path, capsys):
    assert cli.main(["measure", "--out", str(tmp_path / "t.json"), "--links", "compute"]) == 2
    assert "--links = 'compute': needs the script's arguments" in capsys.readouterr().err


@pytest.mark.parametrize(("tp", "instances"), [(1, 1), (2, 1), (2, 2), (8, 1)])
def test_ranks_are_placed_as_in_training(tp, instances):
    """All ranks of tensor-parallel groups measure, so the links of a node are shared as in training."""
    options = Options(data_parallel_size=4, tensor_model_parallel_size=tp, pipeline_model_parallel_size=2)
    options = replace(options, num_distributed_optimizer_instances=instances)
    parallel = sized(pp=2, dp=4 * instances, tp=tp, instances=instances, microbatches=1)
    sets = [members for stage in range(2) for members in parallel.replicas(stage)]
    assert options.world_size == parallel.world_size == 4 * tp * instances * 2
    for rank in range(options.world_size):
        group, place = options.data_place(rank)
        assert sets[group][place] == rank


def test_experts_may_have_more_sharers_than_other_parameters():
    """Experts that are not cut by tensor parallelism are sharded over its ranks as well."""
    options = Options(data_parallel_size=2, tensor_model_parallel_size=2, expert_data_parallel_size=4).check()
    assert options.largest_shards == options.max_bytes
    with pytest.raises(InputError, match="3 ranks that share the same experts do not divide the 4 ranks of a stage"):
        replace(options, expert_data_parallel_size=3).check()


@pytest.mark.parametrize(
    ("pp", "dp", "of_node", "pairs"),
    [
        (4, 1, 4, {(0, 1), (2, 3)}),  # one node
        (4, 1, 2, {(1, 2), (0, 3)}),  # messages that leave a node go from odd stages to even ones
        (4, 1, 1, {(0, 1), (2, 3)}),  # all leave it
        (2, 2, 2, {(0, 2), (1, 3)}),
        (4, 2, 4, {(2, 4), (3, 5), (0, 6), (1, 7)}),
        (3, 1, 2, {(1, 2)}),
        (3, 1, 3, {(0, 1)}),
        (1, 2, 1, set()),
    ],
)
def test_messages_between_nodes_are_measured_where_there_are_any(pp, dp, of_node, pairs):
    options = Options(pipeline_model_parallel_size=pp, data_parallel_size=dp, ranks_per_node=of_node)
    peers = options.peers
    assert {tuple(sorted((rank, other))) for rank, other in enumerate(peers) if other is not None} == pairs
    assert all(peers[other] == rank for rank, other in enumerate(peers) if other is not None)
