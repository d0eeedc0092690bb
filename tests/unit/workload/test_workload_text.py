"""The line of a workload."""

from msgspec.structs import replace
from planning_cases import make_workload

from megatron_ext.workload.workload_text import text


def test_parameters_of_one_tensor_parallel_rank_are_said_to_be():
    work = make_workload()
    parallel = replace(work.parallel, tensor_model_parallel_size=4)
    assert "tensor-parallel" not in text(work, "w.json")
    assert "chunks of one of 4 tensor-parallel ranks;" in text(replace(work, parallel=parallel), "w.json")
