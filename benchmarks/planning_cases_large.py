"""Model shapes and machines of the planner's suite, made up from published figures.

Shapes: GPT-3 175B (arXiv 2005.14165), Llama 2 70B (2307.09288), Llama 3.1 405B (2407.21783).
Links: published figures (8xA100 235 GB/s bus and 25 GB/s host copies; 8xH100
360 and 55 GB/s; two nodes of H100 on a slow network 54 GB/s; PCIe only 20 GB/s; host-offloaded:
parameters updated on the host, so that publishing is nearly free and gathers cross a slow
network). Compute: 6 FLOP per parameter and token at 45 % of the accelerator's peak. Synthetic:
the tables say so.
"""

from math import prod
from typing import NamedTuple

from megatron_ext.cost import cost_table as cost
from megatron_ext.workload import workload
from megatron_ext.workload.parallel import Parallel


class Shape(NamedTuple):
    name: str
    layers: int
    hidden: int
    feed_forward: int
    key_value: int  # width of keys and of values
    gated: bool
    pp: int
    vp: int
    tp: int


SHAPES = (
    Shape("gpt3-175b", 96, 12288, 49152, 12288, False, 16, 6, 8),
    Shape("llama-70b", 80, 8192, 28672, 1024, True, 4, 5, 8),
    Shape("llama-405b", 126, 16384, 53248, 1024, True, 18, 7, 8),
)


class Machine(NamedTuple):
    name: str
    gather: float  # bytes a microsecond by all-gather
    copy: float  # bytes a microsecond from the host
    publish: float
    peak: float  # FLOP a microsecond
    latency_us: float
    nic_shares_pcie: bool = False


MACHINES = (
    Machine("8xA100", 235e3, 25e3, 22e3, 312e6, 25.0),
    Machine("8xH100", 360e3, 55e3, 50e3, 989e6, 25.0),
    Machine("2x8xH100-slow", 54e3, 55e3, 50e3, 989e6, 60.0),
    Machine("pcie-only", 20e3, 22e3, 20e3, 312e6, 30.0),
    Machine("host-offloaded", 25e3, 50e3, 5e6, 312e6, 40.0, True),
)

SEQUENCE = 4096


def make_workload(
    shape: Shape,
    *,
    zero_stage: int,
    microbatches: int,
    data_parallel: int = 8,
    pp: int | None = None,
    vp: int | None = None,
) -> workload.Workload:
    """Every stage has as even a share of the layers as divides; embeddings are left out, since
    they differ most between implementations. With zero stage 3 there is room for two chunks and
    a half."""
    pp, vp = pp or shape.pp, vp or shape.vp
    parallel = Parallel(
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=vp,
        data_parallel_size=data_parallel,
        tensor_model_parallel_size=shape.tp,
        num_microbatches=microbatches,
        gpus_per_node=8,
        order="interleaved" if vp > 1 else "1f1b",
    )
    hidden, tp = shape.hidden, shape.tp
    matrices = {
        "qkv": ((hidden + 2 * shape.key_value) // tp, hidden),
        "proj": (hidden, hidden // tp),
        "fc1": (shape.feed_forward * (2 if shape.gated else 1) // tp, hidden),
        "fc2": (hidden, shape.feed_forward // tp),
        "norm1": (hidden,),
        "norm2": (hidden,),
    }
    order = ("norm1", "qkv", "proj", "norm2", "fc1", "fc2")
    stages = pp * vp
    counts = [shape.layers // stages + (stage < shape.layers % stages) for stage in range(stages)]
    chunks = []
    for stage, count in enumerate(counts):
        parameters = tuple(
            workload.Parameter(
                name=f"layers.{n}.{name}",
                shape=matrices[name],
                dtype="bfloat16",
                bytes=2 * prod(matrices[name]),
                layer=n,
            )
            for n in range(count)
            for name in order
        )
        chunks.append(workload.Chunk(pp_rank=stage % pp, model_chunk_id=stage // pp, parameters=parameters))
    limit = None if zero_stage == 1 else int(2.5 * max(chunk.bytes for chunk in chunks))
    return workload.check(
        workload.Workload(
            schema_version=workload.SCHEMA_VERSION,
            kind="workload",
            parallel=parallel,
            zero_stage=zero_stage,
            chunks=tuple(chunks),
            p2p_bytes=SEQUENCE * hidden * 2 // tp,
            limits=workload.Limits(whole_parameter_bytes=limit),
        )
    )


def make_table(machine: Machine, work: workload.Workload) -> cost.CostTable:
    def line(rate: float) -> cost.Curve:
        sizes = [4**n for n in range(4, 20)]
        return cost.Curve(points=tuple(cost.Point(size_bytes=s, p50_us=machine.latency_us + s / rate) for s in sizes))

    compute = []
    for chunk in work.chunks:
        forward = 2 * (chunk.bytes / 2) * SEQUENCE / (0.45 * machine.peak) or 1.0
        compute.append(
            cost.Compute(
                pp_rank=chunk.pp_rank, model_chunk_id=chunk.model_chunk_id, forward_us=forward, backward_us=2 * forward
            )
        )
    pairs = (
        ("gpu", "cpu", 1.10),
        ("cpu", "gpu", 1.05),
        ("compute", "gpu", 1.03),
        ("publish", "cpu", 1.2),
        ("cpu", "publish", 1.2),
    )
    return cost.check(
        cost.CostTable(
            schema_version=2,
            kind="cost_table",
            metadata=cost.Metadata(synthetic=True, hardware=machine.name),
            routes=cost.Routes(gpu=line(machine.gather), cpu=line(machine.copy)),
            publish=cost.Publish(cpu=line(machine.publish)),
            contention=tuple(
                cost.Contention(measured=m, busy=b, slowdown=s)
                for m, b, s in pairs
                if not (machine.nic_shares_pcie and {m, b} == {"gpu", "cpu"})
            ),
            compute=tuple(compute),
            p2p=line(20e3),
            host_memory=cost.HostMemory(bytes_per_s=1e12),  # more than all copies move
            topology=cost.Topology(nic_shares_pcie=machine.nic_shares_pcie),
        )
    )
