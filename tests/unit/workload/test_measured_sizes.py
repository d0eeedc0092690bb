"""Which sizes a measurement is told, from what will be trained."""

from megatron_ext.workload.measured_sizes import MOST_SIZES, largest_group_bytes, likely_group_bytes
from megatron_ext.workload.parallel import Parallel
from megatron_ext.workload.workload import Chunk, Parameter, Workload, check, group_bytes


def parameter(layer: int, numel: int, name: str) -> Parameter:
    return Parameter(name=name, shape=(numel,), dtype="float32", layer=layer, bytes=numel * 4)


def workload(*layers_of_chunks: list[int]) -> Workload:
    """Chunks with one parameter of so many elements in every layer."""
    parallel = Parallel(
        pipeline_model_parallel_size=2,
        virtual_pipeline_model_parallel_size=1,
        data_parallel_size=2,
        num_microbatches=4,
        order="1f1b",
    )
    chunks = tuple(
        Chunk(
            pp_rank=rank,
            model_chunk_id=0,
            parameters=tuple(parameter(layer, numel, f"{rank}.{layer}") for layer, numel in enumerate(layers)),
        )
        for rank, layers in enumerate(layers_of_chunks)
    )
    return check(Workload(schema_version=2, kind="workload", parallel=parallel, zero_stage=1, chunks=chunks))


def test_one_layer_of_each_kind_and_one_chunk():
    work = workload([1 << 16, 1 << 14, 1 << 14], [1 << 14, 1 << 14, 1 << 13])
    wanted = [1 << 13, 1 << 14, 1 << 16, (1 << 15) + (1 << 13), (1 << 16) + (1 << 15)]
    found = likely_group_bytes(work)
    assert found == sorted(found) and len(found) == len(set(found)) == 5
    assert all(0 <= size - 4 * numel <= 4096 for size, numel in zip(found, sorted(wanted))), (
        "as large as the bucket, with its padding"
    )
    assert found[-1] == largest_group_bytes(work) == group_bytes(work.chunks[0].parameters, work.parallel)


def test_the_largest_where_there_are_too_many_and_none_without_parameters():
    work = workload([(number + 1) << 12 for number in range(20)], [])
    found, of_chunk = likely_group_bytes(work), largest_group_bytes(work)
    assert len(found) == MOST_SIZES and found[-2:] == [20 << 14, of_chunk]
    assert likely_group_bytes(workload([], [])) == []
