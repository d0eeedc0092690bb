"""Where a cost table was measured, beside where it is used."""

import pytest
from parallel_sizes import sized

from megatron_ext.cost.cost_table import Metadata, Source
from megatron_ext.cost.environment import environment_differences, estimated_of, refuse, run_differences, world_sizes
from megatron_ext.formats.errors import InputError
from megatron_ext.workload import workload
from megatron_ext.workload.gpt_shapes import GptShape, MicroBatch, gpt_workload
from megatron_ext.workload.optimizer_settings import OptimizerSettings
from megatron_ext.workload.parallel import Parallel

SHAPE = GptShape(4, 64, 256, 4, 4, 384, 16, dtype="float32")
BATCH = MicroBatch(128, 2)
MODEL = {"dtype": "float32", "seq_length": 128, "micro_batch_size": 2, "hidden_size": 64}


def gpt(pp: int = 1, shape: GptShape = SHAPE, batch: MicroBatch = BATCH, **optimizer):
    parallel = sized(pp=pp, vp=1, dp=2, microbatches=4, order="1f1b" if pp > 1 else "no_pipeline")
    return gpt_workload(shape, parallel, batch, optimizer=OptimizerSettings(**optimizer))


@pytest.mark.parametrize("pp", [1, 2])
def test_compute_of_another_batch_is_seen_without_a_pipeline_too(pp):
    assert run_differences(Metadata(model=MODEL), gpt(pp)) == []
    for batch, shape in ((MicroBatch(256, 2), SHAPE), (MicroBatch(128, 4), SHAPE)):
        assert "(sequence x micro-batch x hidden)" in run_differences(Metadata(model=MODEL), gpt(pp, shape, batch))[0]
    assert run_differences(Metadata(model=MODEL), gpt(pp, SHAPE._replace(hidden=128)))


@pytest.mark.parametrize("pp", [1, 2])
def test_a_table_of_whole_sequences_holds_for_ranks_that_divide_them(pp):
    work = gpt(pp, batch=MicroBatch(128, 2, context_parallel=2))
    assert run_differences(Metadata(model=MODEL | {"sequence_parts": 2}), work) == []
    assert run_differences(Metadata(model=MODEL), work)  # compute of twice as many tokens


def test_an_estimate_is_of_the_model_that_it_was_made_of():
    """Its rows of compute are of chunks, which other models have as well."""
    work = gpt()
    of = Metadata(synthetic=True, model=estimated_of(work), source=Source(program="megatron-ext cost estimate"))
    assert run_differences(of, work) == []
    assert run_differences(of, gpt(shape=SHAPE._replace(layers=8)))[0].startswith("model.fingerprint: table ")
    on_host = run_differences(of, gpt(on_host=True))
    assert on_host == ["model.optimizer_on_host: table False, here True"]


def test_the_nodes_of_memory_and_emulated_links_belong_to_a_machine():
    here = {"hardware": {"processors": 2, "numa_nodes": 2}}
    assert environment_differences(Metadata(**here), here) == []
    four = Metadata(hardware={"processors": 2, "numa_nodes": 4})
    assert environment_differences(four, here) == ["hardware.numa_nodes: table 4, here 2"]
    earlier = Metadata(hardware={"processors": 2})
    assert environment_differences(earlier, here) == ["hardware.numa_nodes: the table does not say, here 2"]
    assert environment_differences(earlier, {"hardware": {"processors": 2, "numa_nodes": 1}}) == []
    emulated = Metadata(hardware=here["hardware"] | {"caution": "EMULATED links"})
    assert environment_differences(emulated, here) == ["hardware.caution: table EMULATED links, here None"]
    assert environment_differences(emulated, {"software": {}}) == []  # the machine is not compared


def test_tensor_parallel_ranks_are_counted():
    """All of them measure."""

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
            "tensor_model_parallel_size": 2,
            "ranks_per_node": measured_on,
        }
        model_of = {"dtype": "float32", "seq_length": 128, "micro_batch_size": 1, "hidden_size": 64}
        return run_differences(Metadata(world_sizes=there, model=model_of), work)

    sizes = dict(tensor_model_parallel_size=2, data_parallel_size=8, pipeline_model_parallel_size=1, gpus_per_node=8)
    assert differing(4, **sizes) == ["world_sizes.ranks_per_node: table 4, here 8"] and differing(8, **sizes) == []
    other = sizes | {"tensor_model_parallel_size": 4}
    assert differing(8, **other) == ["world_sizes.tensor_model_parallel_size: table 2, here 4"]
    # Without sequence parallelism every rank sends the whole message.
    assert differing(8, tensor_model_parallel_size=2, data_parallel_size=2, pipeline_model_parallel_size=2) == []


def test_environment():
    parallel = Parallel(
        pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2, data_parallel_size=2, num_microbatches=4
    )
    here = {"hardware": {"device": "H200"}, "software": {"torch": "2.6.0"}, "world_sizes": world_sizes(parallel)}
    measured = Metadata(**here)
    assert environment_differences(measured, here) == []
    other = Metadata(
        hardware={"device": "A100"},
        software={"torch": "2.6.0"},
        world_sizes={"data_parallel_size": 4, "pipeline_model_parallel_size": 2, "ranks_per_node": 4},
    )
    assert environment_differences(other, here) == [
        "hardware.device: table A100, here H200",
        "world_sizes.data_parallel_size: table 4, here 2",
    ]
    assert environment_differences(Metadata(), here)[0] == "hardware.device: the table does not say, here H200"
    assert environment_differences(Metadata(synthetic=True, **here), here) == ["synthetic: the table was not measured"]
    with pytest.raises(
        InputError,
        match="T.json: metadata: was measured in another environment .hardware.device: table A100, here H200",
    ):
        refuse(environment_differences(other, here), allow=False, file="T.json")
    assert refuse(environment_differences(other, here), allow=True) == environment_differences(other, here)
