"""Two made-up cost tables: gathers of a cluster, and copies and compute of one GPU."""

from megatron_ext.cost.cost_table import Compute, Contention, CostTable, Curve, Metadata, Point, Routes, check


def curve(rate=1.0, **algorithms):
    points = tuple(Point(size_bytes=1 << power, p50_us=(10 + (1 << power) / 1e4) * rate) for power in range(12, 24))
    return Curve(
        points=points if not algorithms else (),
        algorithms={
            name: tuple(p.__class__(size_bytes=p.size_bytes, p50_us=p.p50_us * factor) for p in points)
            for name, factor in algorithms.items()
        },
    )


def table(**fields):
    return check(CostTable(schema_version=2, kind="cost_table", **fields))


CLUSTER = table(routes=Routes(gpu=curve()), metadata=Metadata(hardware={"device": "H200"}, notes=("a note",)))


ONE_GPU = table(
    routes=Routes(gpu=curve(2.0), cpu=curve(3.0)),
    compute=(Compute(layer_kind="transformer", forward_us=1, backward_us=2),),
    contention=(Contention(measured="gpu", busy="cpu", slowdown=1.1, size_bytes=4096),),
    metadata=Metadata(hardware={"device": "A100"}, synthetic=True),
)
