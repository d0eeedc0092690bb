"""Workloads at the edge of what can be planned, from parameters given one by one."""

from msgspec.structs import replace
from planning_cases import make_workload

from megatron_ext.workload import workload

ONE = dict(pp=1, vp=1, order="no_pipeline", microbatches=1)


def parameters(*numels, layers=None):
    return tuple(
        workload.Parameter(
            name=f"p{index}",
            shape=(numel,),
            dtype="bfloat16",
            bytes=2 * numel,
            layer=layers[index] if layers else index,
        )
        for index, numel in enumerate(numels)
    )


def work_of(chunks, kinds=(), limits=None, **shape):
    made = make_workload(**shape)
    chunks = tuple(replace(chunk, parameters=own, layer_kinds=kinds) for chunk, own in zip(made.chunks, chunks))
    return workload.check(replace(made, chunks=chunks, **({"limits": limits} if limits else {})))
