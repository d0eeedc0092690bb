"""Small made-up workloads and cost tables for tests and benchmarks of simulator and planner."""

import random
from math import prod

from msgspec.structs import replace

from megatron_ext.cost import model as cost
from megatron_ext.workload import model as workload
from megatron_ext.workload.parallel import Parallel


def curve(us_of_bytes, largest: int = 1 << 36) -> cost.Curve:
    """A curve through factor-4 sizes."""
    sizes = [4**n for n in range(2, 40) if 4**n <= largest]
    return cost.Curve(points=tuple(cost.Point(size_bytes=s, p50_us=us_of_bytes(s)) for s in sizes))


def line(latency_us: float, bytes_per_us: float) -> cost.Curve:
    return curve(lambda size: latency_us + size / bytes_per_us)


def make_workload(
    *, pp=2, vp=2, dp=2, microbatches=4, layers=2, hidden=64, order="interleaved", zero_stage=1,
    p2p_bytes=4096, dtypes=("bfloat16",), gpus_per_node=None, group=None, **limits,
) -> workload.Workload:  # fmt: skip
    """Equal chunks of ``layers`` layers with five parameters each."""
    parallel = Parallel(
        pipeline_model_parallel_size=pp, virtual_pipeline_model_parallel_size=vp, data_parallel_size=dp,
        num_microbatches=microbatches, order=order, gpus_per_node=gpus_per_node, microbatch_group_size_per_vp_stage=group,
    )  # fmt: skip
    shapes = {"norm": (hidden,), "qkv": (3 * hidden, hidden), "proj": (hidden, hidden), "fc1": (4 * hidden, hidden), "fc2": (hidden, 4 * hidden)}
    chunks = []
    for chunk in range(vp):
        for rank in range(pp):
            parameters = []
            for layer in range(layers):
                for number, (name, shape) in enumerate(shapes.items()):
                    dtype = dtypes[number % len(dtypes)]
                    size = prod(shape) * workload.ITEM_BYTES[dtype]
                    parameters.append(workload.Parameter(name=f"layers.{layer}.{name}", shape=shape, dtype=dtype, bytes=size, layer=layer))
            chunks.append(workload.Chunk(pp_rank=rank, model_chunk_id=chunk, parameters=tuple(parameters)))
    return workload.check(
        workload.Workload(
            schema_version=1, kind="workload", parallel=parallel, zero_stage=zero_stage, chunks=tuple(chunks),
            p2p_bytes=p2p_bytes, limits=workload.Limits(**limits),
        )
    )  # fmt: skip


def make_table(
    work, *, gpu=(20.0, 1e4), cpu=(10.0, 5e3), nvme=None, publish=(5.0, 2e4), forward=100.0, backward=200.0, p2p=(5.0, 1e5),
    contention=(), **more,
) -> cost.CostTable:  # fmt: skip
    """Straight lines, given as (latency in us, bytes per us); None leaves a curve out."""
    parallel = work.parallel
    routes = {name: line(*given) for name, given in (("gpu", gpu), ("cpu", cpu), ("nvme", nvme)) if given}
    published = {"cpu": line(*publish)} if publish else {}
    if publish and nvme:
        published["nvme"] = line(*publish)
    return cost.check(
        cost.CostTable(
            schema_version=1, kind="cost_table", routes=cost.Routes(**routes), publish=cost.Publish(**published),
            contention=tuple(cost.Contention(measured=m, busy=b, slowdown=s) for m, b, s in contention),
            compute=tuple(
                cost.Compute(pp_rank=rank, model_chunk_id=chunk, forward_us=forward, backward_us=backward)
                for rank in range(parallel.pp) for chunk in range(parallel.vp)
            ),
            p2p=line(*p2p) if p2p else (), **more,
        )
    )  # fmt: skip


def random_case(seed: int):
    """A small workload and table drawn with ``seed``: both zero stages, tight and loose limits."""
    draw = random.Random(seed)
    zero_stage = draw.choice((1, 3))
    pp, vp, microbatches, order = draw.choice(
        ((1, 1, 2, "no_pipeline"), (1, 1, 3, "no_pipeline"), (2, 1, 2, "1f1b"), (2, 2, 2, "interleaved"), (2, 1, 2, "gpipe"), (3, 1, 3, "1f1b"))
    )
    shape = dict(pp=pp, vp=vp, microbatches=microbatches, layers=draw.choice((1, 2)), order=order, zero_stage=zero_stage)
    layer = make_workload(**shape | {"layers": 1}).chunks[0].bytes
    limits = {}
    if zero_stage == 3:
        # From one layer and its padding to no limit.
        factor = draw.choice((None, 1.1, 1.6, 2.2, 3.3))
        limits["device_bytes"] = factor and int(layer * factor) + 2048
    if draw.random() < 0.3:
        limits["pinned_host_bytes"] = int(layer * shape["layers"] * pp * vp * draw.choice((0.3, 0.6)))
    work = make_workload(**shape, **limits)
    forward = draw.uniform(5, 60)
    contention = (("gpu", "cpu", 1.1), ("cpu", "gpu", 1.08), ("compute", "gpu", 1.05)) if draw.random() < 0.4 else ()
    table = make_table(
        work, gpu=(draw.uniform(1, 8), draw.uniform(800, 6000)), cpu=(draw.uniform(1, 8), draw.uniform(800, 6000)),
        publish=(1.0, draw.uniform(2000, 20000)), forward=forward, backward=2 * forward, p2p=(2.0, 1e4), contention=contention,
    )  # fmt: skip
    return work, table


def uneven_case(seed: int):
    """Zero stage 3 with layers of very different size and little room, where a group may have to
    make room although it is needed again before its step ends."""
    draw = random.Random(seed)
    pp, vp, order = draw.choice(((1, 1, "no_pipeline"), (2, 1, "1f1b"), (2, 2, "interleaved")))
    layers = draw.choice((3, 4, 6))
    base = make_workload(pp=pp, vp=vp, order=order, layers=layers, microbatches=4, zero_stage=3)
    chunks = []
    for chunk in base.chunks:
        times = [draw.choice((1, 1, 1, 2, 4)) for _ in range(layers)]
        parameters = tuple(
            replace(p, shape=(p.shape[0] * times[p.layer], *p.shape[1:]), bytes=p.bytes * times[p.layer]) for p in chunk.parameters
        )
        chunks.append(replace(chunk, parameters=parameters))
    largest = max(sum(p.bytes for p in chunk.parameters if p.layer == layer) for chunk in chunks for layer in range(layers))
    rank = max(sum(chunk.bytes for chunk in chunks if chunk.pp_rank == number) for number in range(pp))
    limit = int(largest * draw.uniform(1.0, 1.5)) + 4096 + int((rank - largest) * draw.choice((0, 0.1, 0.3, 0.6, 0.8)))
    work = workload.check(replace(base, chunks=tuple(chunks), limits=workload.Limits(device_bytes=limit)))
    cpu = draw.choice((None, (3.0, 900.0)))
    table = make_table(work, gpu=(draw.uniform(1, 8), draw.uniform(300, 6000)), cpu=cpu, forward=draw.uniform(5, 100), backward=draw.uniform(10, 200))
    return work, table
