"""The line of a workload."""

from msgspec.structs import replace
from planning_cases import make_workload

from megatron_ext.workload.workload_text import not_counted, text


def test_parameters_of_one_tensor_parallel_rank_are_said_to_be():
    work = make_workload()
    parallel = replace(work.parallel, tensor_model_parallel_size=4)
    assert "tensor-parallel" not in text(work, "w.json")
    assert "chunks of one of 4 tensor-parallel ranks;" in text(replace(work, parallel=parallel), "w.json")


def test_chunks_without_activations_are_named():
    """Only Megatron's layers count them, and a chunk with a kernel that cannot run without data has none."""
    work = make_workload(pp=2, vp=1, order="1f1b")
    none, *others = (replace(chunk, activation_bytes=()) for chunk in work.chunks)
    some = tuple(replace(chunk, activation_bytes=(8,) * chunk.num_layers) for chunk in others)
    assert not_counted(replace(work, chunks=(none, *others))) == "activations are not counted"
    assert not_counted(replace(work, chunks=(none, *some))) == "activations of rank 0 chunk 0 are not counted"
    assert not_counted(replace(work, chunks=some)) is None
