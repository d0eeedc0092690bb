"""Where a cost table was measured, beside where it is used."""

import pytest

from megatron_ext.cost.cost_table import Metadata
from megatron_ext.cost.environment import differences, refuse, run_differences, world_sizes
from megatron_ext.formats.errors import InputError
from megatron_ext.workload import workload
from megatron_ext.workload.parallel import Parallel


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
