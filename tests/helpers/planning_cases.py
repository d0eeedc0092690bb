"""Small made-up workloads and cost tables for tests and benchmarks of simulator and planner."""

import random
from math import prod

from msgspec.structs import replace
from parallel_sizes import sized

from megatron_ext.bounds.feasibility import check_fits
from megatron_ext.cost import cost_table as cost
from megatron_ext.formats.errors import InputError
from megatron_ext.workload import workload


def curve(us_of_bytes, largest: int = 1 << 36) -> cost.Curve:
    """A curve through factor-4 sizes."""
    sizes = [4**n for n in range(2, 40) if 4**n <= largest]
    return cost.Curve(points=tuple(cost.Point(size_bytes=s, p50_us=us_of_bytes(s)) for s in sizes))


def flat(us: float) -> cost.Curve:
    """The same time at every size."""
    return cost.Curve(points=(cost.Point(size_bytes=1, p50_us=us), cost.Point(size_bytes=1 << 40, p50_us=us)))


def line(latency_us: float, bytes_per_us: float) -> cost.Curve:
    return curve(lambda size: latency_us + size / bytes_per_us)


WHOLE = {"reduce": line(20.0, 1e4), "optimizer": line(20.0, 1e4)}
"""What :func:`make_table` needs beside its own curves for a prediction that leaves nothing out."""


def make_workload(
    *,
    pp=2,
    vp=2,
    dp=2,
    microbatches=4,
    layers=2,
    hidden=64,
    order="interleaved",
    zero_stage=1,
    p2p_bytes=4096,
    dtypes=("bfloat16",),
    gpus_per_node=None,
    group=None,
    instances=1,
    **limits,
) -> workload.Workload:
    """Equal chunks of ``layers`` layers with five parameters each."""
    how = dict(order=order, gpus_per_node=gpus_per_node, group=group, instances=instances)
    parallel = sized(pp=pp, vp=vp, dp=dp, microbatches=microbatches, **how)
    shapes = {
        "norm": (hidden,),
        "qkv": (3 * hidden, hidden),
        "proj": (hidden, hidden),
        "fc1": (4 * hidden, hidden),
        "fc2": (hidden, 4 * hidden),
    }
    chunks = []
    for chunk in range(vp):
        for rank in range(pp):
            parameters = []
            for layer in range(layers):
                for number, (name, shape) in enumerate(shapes.items()):
                    dtype = dtypes[number % len(dtypes)]
                    size = prod(shape) * workload.ITEM_BYTES[dtype]
                    parameters.append(
                        workload.Parameter(
                            name=f"layers.{layer}.{name}", shape=shape, dtype=dtype, bytes=size, layer=layer
                        )
                    )
            chunks.append(workload.Chunk(pp_rank=rank, model_chunk_id=chunk, parameters=tuple(parameters)))
    return workload.check(
        workload.Workload(
            schema_version=workload.SCHEMA_VERSION,
            kind="workload",
            parallel=parallel,
            zero_stage=zero_stage,
            chunks=tuple(chunks),
            p2p_bytes=p2p_bytes,
            limits=workload.Limits(**limits),
        )
    )


EXPERTS = ("fc1", "fc2")
"""Parameters of :func:`make_workload` that :func:`with_experts` makes experts'."""


def with_experts(work: workload.Workload, ep: int, etp: int | None = None) -> workload.Workload:
    """``work`` with the matrices of every other layer's MLP as the local experts of a rank."""
    parallel = replace(work.parallel, expert_model_parallel_size=ep, expert_tensor_parallel_size=etp)
    chunks = [
        replace(
            chunk,
            parameters=tuple(
                replace(p, expert=p.layer % 2 == 1 and p.name.endswith(EXPERTS)) for p in chunk.parameters
            ),
        )
        for chunk in work.chunks
    ]
    return workload.check(replace(work, parallel=parallel, chunks=tuple(chunks)))


def expert_curves(work, gpu=(20.0, 5e3), reduce=(20.0, 5e3)) -> cost.ExpertCurves:
    """Collectives among the ranks that share the shards of the same experts."""
    return cost.ExpertCurves(ranks=work.parallel.expert_dp, gpu=line(*gpu), reduce=line(*reduce))


def make_table(
    work,
    *,
    gpu=(20.0, 1e4),
    cpu=(10.0, 5e3),
    nvme=None,
    publish=(5.0, 2e4),
    forward=100.0,
    backward=200.0,
    p2p=(5.0, 1e5),
    contention=(),
    **more,
) -> cost.CostTable:
    """Straight lines, given as (latency in us, bytes per us); None leaves a curve out."""
    parallel = work.parallel
    routes = {name: line(*given) for name, given in (("gpu", gpu), ("cpu", cpu), ("nvme", nvme)) if given}
    published = {"cpu": line(*publish)} if publish else {}
    if publish and nvme:
        published["nvme"] = line(*publish)
    return cost.check(
        cost.CostTable(
            schema_version=2,
            kind="cost_table",
            routes=cost.Routes(**routes),
            publish=cost.Publish(**published),
            contention=tuple(cost.Contention(measured=m, busy=b, slowdown=s) for m, b, s in contention),
            compute=tuple(
                cost.Compute(pp_rank=rank, model_chunk_id=chunk, forward_us=forward, backward_us=backward)
                for rank in range(parallel.pp)
                for chunk in range(parallel.vp)
            ),
            p2p=line(*p2p) if p2p else (),
            **more,
        )
    )


def random_case(seed: int):
    """A small workload and table drawn with ``seed``: both zero stages, tight and loose limits."""
    draw = random.Random(seed)
    zero_stage = draw.choice((1, 3))
    pp, vp, microbatches, order = draw.choice(
        (
            (1, 1, 2, "no_pipeline"),
            (1, 1, 3, "no_pipeline"),
            (2, 1, 2, "1f1b"),
            (2, 2, 2, "interleaved"),
            (2, 1, 2, "gpipe"),
            (3, 1, 3, "1f1b"),
        )
    )
    shape = dict(
        pp=pp, vp=vp, microbatches=microbatches, layers=draw.choice((1, 2)), order=order, zero_stage=zero_stage
    )
    layer = make_workload(**shape | {"layers": 1}).chunks[0].bytes
    limits = {}
    if zero_stage == 3:
        # From one layer and its padding to no limit.
        factor = draw.choice((None, 1.1, 1.6, 2.2, 3.3))
        limits["whole_parameter_bytes"] = factor and int(layer * factor) + 2048
    if draw.random() < 0.3:
        limits["pinned_host_bytes"] = int(layer * shape["layers"] * pp * vp * draw.choice((0.3, 0.6)))
    work = make_workload(**shape, **limits)
    forward = draw.uniform(5, 60)
    contention = (("gpu", "cpu", 1.1), ("cpu", "gpu", 1.08), ("compute", "gpu", 1.05)) if draw.random() < 0.4 else ()
    table = make_table(
        work,
        gpu=(draw.uniform(1, 8), draw.uniform(800, 6000)),
        cpu=(draw.uniform(1, 8), draw.uniform(800, 6000)),
        publish=(1.0, draw.uniform(2000, 20000)),
        forward=forward,
        backward=2 * forward,
        p2p=(2.0, 1e4),
        contention=contention,
    )
    return work, table


def uneven_case(seed: int):
    """Zero stage 3 with layers of very different size and a limit that is a little above the largest of them, or leaves
    room for a part of the others: a group may have to make room although it is needed again before its step ends."""
    draw = random.Random(seed)
    pp, vp, order, microbatches = draw.choice(
        (
            (1, 1, "no_pipeline", 2),
            (1, 1, "no_pipeline", 4),
            (2, 1, "1f1b", 2),
            (2, 1, "1f1b", 4),
            (2, 2, "interleaved", 2),
        )
    )
    layers = draw.choice((2, 3, 4, 6) if pp == 1 else (2, 3))
    dtypes = draw.choice((("bfloat16",), ("bfloat16",), ("bfloat16", "float32")))
    base = make_workload(
        pp=pp, vp=vp, order=order, layers=layers, microbatches=microbatches, zero_stage=3, dtypes=dtypes
    )
    chunks = []
    for chunk in base.chunks:
        times = [draw.choice((1, 1, 1, 2, 4, 8)) for _ in range(layers)]
        parameters = tuple(
            replace(p, shape=(p.shape[0] * times[p.layer], *p.shape[1:]), bytes=p.bytes * times[p.layer])
            for p in chunk.parameters
        )
        if draw.random() < 0.2:  # an output layer that is tied to the embedding of the same chunk
            parameters = (replace(parameters[0], borrowed_by=(layers - 1,)), *parameters[1:])
        chunks.append(replace(chunk, parameters=parameters))
    work = workload.check(replace(base, chunks=tuple(chunks)))
    largest = least_room(work)
    rank = max(sum(chunk.bytes for chunk in chunks if chunk.pp_rank == number) for number in range(pp))
    more = max(rank - largest, 0) * draw.choice((0, 0, 0, 0.1, 0.3, 0.6, 0.8))
    limit = int(largest * draw.choice((1.0, 1.01, 1.05, 1.2, 1.5)) + more)
    hosted = draw.choice((None, None, int(rank * pp * draw.uniform(0.2, 0.8))))
    work = workload.check(replace(work, limits=workload.Limits(whole_parameter_bytes=limit, pinned_host_bytes=hosted)))
    forward = draw.uniform(5, 100)
    table = make_table(
        work,
        gpu=(draw.uniform(1, 8), draw.uniform(300, 6000)),
        cpu=draw.choice((None, (3.0, 900.0), (draw.uniform(1, 8), draw.uniform(300, 6000)))),
        publish=(1.0, draw.uniform(2000, 20000)),
        forward=forward,
        backward=forward * draw.uniform(1.5, 2.5),
        contention=draw.choice(((), (("gpu", "cpu", 1.1), ("cpu", "gpu", 1.08), ("compute", "gpu", 1.05)))),
    )
    return work, table


def least_room(work: workload.Workload) -> int:
    """The least limit of whole parameters within which the workload can be trained at all."""
    low, high = 0, sum(chunk.bytes for chunk in work.chunks) * 4
    while high - low > 1:
        middle = (low + high) // 2
        try:
            check_fits(replace(work, limits=workload.Limits(whole_parameter_bytes=middle)))
            high = middle
        except InputError:
            low = middle
    return high


def table_of(work, *, gpu=100.0, cpu=None, publish=10.0, nvme=None, forward=100.0, backward=200.0, **more):
    """Gathers, publishing and compute that take the same time at every size and in every chunk."""
    routes = {name: flat(us) for name, us in (("gpu", gpu), ("cpu", cpu), ("nvme", nvme)) if us}
    return cost.check(
        cost.CostTable(
            schema_version=2,
            kind="cost_table",
            routes=cost.Routes(**routes),
            publish=cost.Publish(cpu=flat(publish), nvme=flat(publish)),
            compute=tuple(
                cost.Compute(pp_rank=r, model_chunk_id=c, forward_us=forward, backward_us=backward)
                for r in range(work.parallel.pp)
                for c in range(work.parallel.vp)
            ),
            **more,
        )
    )
