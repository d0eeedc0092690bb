"""Cost tables of known machines, made from published figures. They are simulated, never measured here.

data/published_links.json says where each figure comes from, and which are assumed or derived:
where a network card and host copies share the GPU's PCIe link, the card comes first and a copy
beside a gather gets what is left of the link. The rate of TCP is that of the data sheets (``OVER_TCP``).
"""

import json
from pathlib import Path
from typing import NamedTuple

import msgspec
from model_shapes import flop_of_kinds

from megatron_ext.cost import cost_table as cost
from megatron_ext.cost.curve import lookup
from megatron_ext.cost.hardware_sheet import OVER_TCP

DATA = Path(__file__).parent / "data"
SIZES = tuple(1 << n for n in range(16, 38))
"""Sizes at which made-up curves have points."""

PUBLISHED = json.loads((DATA / "published_links.json").read_text())
GATHERS = {
    c["system"]: c["points"] for c in json.loads((DATA / "published_allgather_curves.json").read_text())["curves"]
}


class System(NamedTuple):
    """A machine. ``ranks`` share the data-parallel group; ``network_gb_s`` is one GPU's share of
    the network (0: one node); ``offloaded``: parameters live in host memory. ``memory_gb``: of one
    GPU, for parameters, gradients and optimizer state; activations come on top."""

    title: str
    ranks: int
    gpu: str
    gather: str
    network_gb_s: float = 0.0
    offloaded: bool = False
    memory_gb: int = 80

    @property
    def nodes(self) -> int:
        return 2 if self.network_gb_s else 1

    @property
    def tcp_gb_s(self) -> float:
        """Published shards travel between nodes over TCP, no faster than the GPU's share of the network."""
        return min(OVER_TCP.value / 1e9, self.network_gb_s)


def _rate(name: str) -> float:
    return PUBLISHED["all_gather_gb_s"][name]["value"]


SYSTEMS = {
    "nvlink-a100": System("one NVLink node, 8xA100", 8, "A100", "8xA100"),
    "nvlink-h100": System("one NVLink node, 8xH100", 8, "H100", "8xH100"),
    "nvlink-h200": System("one NVLink node, 8xH200", 8, "H100", "8xH200", memory_gb=141),
    "rdma-h200": System("2 x 8 H200, RDMA", 16, "H100", "2 nodes x 8 H200-class, 8x RDMA NIC", 351 / 8, memory_gb=141),
    "tcpxo-h100": System("2 x 8 H100, TCPXO", 16, "H100", "2 nodes x 8 H100 (TCPXO)", 201 / 8),
    "tcpx-h100": System("2 x 8 H100, TCPX (50 GB/s)", 16, "H100", "2x8 H100 TCPX", _rate("2x8 H100 TCPX") / 8),
    "pcie-only": System("one node, 8 A100 without NVLink", 8, "A100", "pcie"),
    "offload-nvlink": System("one NVLink node, 8xH100, parameters on the host", 8, "H100", "8xH100", offloaded=True),
    "offload-pcie": System(
        "one node, 8 A100 without NVLink, parameters on the host", 8, "A100", "pcie", offloaded=True
    ),
}


def line(latency_us: float, gb_s: float) -> cost.Curve:
    return _curve(lambda size: latency_us + size / gb_s / 1e3)


def _curve(us_of_bytes, source: str | None = None) -> cost.Curve:
    return cost.Curve(points=tuple(cost.Point(size_bytes=s, p50_us=us_of_bytes(s)) for s in SIZES), source=source)


def _read(curve: cost.Curve, size: float) -> float:
    return lookup(curve, int(size), extrapolate=True).us


def gather_curve(system: System) -> cost.Curve:
    """The all-gather alone; where parameters live on the host, behind the copy of the shard."""
    if system.gather in GATHERS:
        published = cost.Curve(
            points=tuple(cost.Point(size_bytes=p["size_bytes"], p50_us=p["us"]) for p in GATHERS[system.gather])
        )
        curve = _curve(lambda size: _read(published, size))
    else:
        latency = PUBLISHED["all_gather_latency_us"]["two nodes" if system.nodes > 1 else "one node"]["value"]
        rate = PUBLISHED["pcie_ring"]["value"] * 8 / 7 if system.gather == "pcie" else _rate(system.gather)
        curve = line(latency, rate)
    if system.offloaded:
        copy = copy_curve(system)
        return _curve(lambda size: _read(curve, size) + _read(copy, size / system.ranks))
    return curve


def copy_curve(system: System) -> cost.Curve:
    """Host copy to device, one GPU's link."""
    rates = PUBLISHED["host_to_device_gb_s"][system.gpu]["points"]
    published = cost.Curve(
        points=tuple(
            cost.Point(size_bytes=s, p50_us=PUBLISHED["copy_latency_us"]["value"] + s / r / 1e3) for s, r in rates
        )
    )
    return _curve(lambda size: _read(published, size))


def publish_curve(system: System) -> cost.Curve:
    """A rank writes its shard: over PCIe, or within host memory where the optimizer ran there."""
    rate = PUBLISHED["host_memory_gb_s" if system.offloaded else "device_to_host_gb_s"]
    rate = rate["value"] if system.offloaded else rate[system.gpu]["value"]
    return _curve(lambda size: PUBLISHED["copy_latency_us"]["value"] + size / system.ranks / rate / 1e3)


def contention(system: System) -> tuple[cost.Contention, ...]:
    beside, both = PUBLISHED["gather_beside_copy"]["value"], PUBLISHED["both_directions"]["value"]
    rows = [("cpu", "publish", both)] if not system.offloaded else []
    link = PUBLISHED["host_to_device_gb_s"][system.gpu]["points"][0][1]
    if system.gather == "pcie":
        rows += [("gpu", "cpu", 2.0), ("cpu", "gpu", 2.0)]  # one link, fairly shared
    else:
        rows.append(("gpu", "cpu", beside))
        used = system.network_gb_s
        if used:
            rows.append(("cpu", "gpu", link / (link - used)))
    if system.nodes > 1:  # nodes exchange what they lack over the gather's network, of which TCP takes a part
        part = system.tcp_gb_s / system.network_gb_s
        rows.append(("gpu", "publish", max(beside, 1 / max(1 - part, 0.5))))
        rows.append(("publish", "gpu", max(2 * part, 1.0)))
    else:
        rows.append(("gpu", "publish", beside))
    return tuple(cost.Contention(measured=m, busy=b, slowdown=s) for m, b, s in rows)


def cost_table(system: System, model: str, tokens: int, *, tp: int = 1) -> cost.CostTable:
    """The cost table of a system for a model's micro-batches of ``tokens``. With ``tp`` 8 the
    groups of a node's eight ranks cross the network side by side: a gather among two ranks takes
    what one of 16 takes that puts as many bytes on each card (16 ranks: 15/16 of the bytes over
    8 cards; 2 ranks: half of them over one)."""
    gather = gather_curve(system)
    if tp > 1:
        assert tp == 8 and system.ranks == 16, "only whole nodes of tensor-parallel ranks"
        wide = gather
        gather = _curve(lambda size: _read(wide, size * (1 / 2) * 8 * 16 / 15))
    rate = PUBLISHED["tflop_s"][system.gpu]["value"] * 1e6  # FLOP a microsecond
    compute = tuple(
        cost.Compute(layer_kind=kind, forward_us=flop / rate, backward_us=2 * flop / rate)
        for kind, flop in flop_of_kinds(model, tokens, tp).items()
    )
    # A node sends what the other lacks, all its cards at once: half of what a ring of all ranks sends.
    two_nodes = PUBLISHED["all_gather_latency_us"]["two nodes"]["value"]
    across = line(two_nodes, system.tcp_gb_s * 8 / tp) if system.nodes > 1 else None
    p2p = system.network_gb_s or PUBLISHED["between_stages_gb_s"]["value"]
    shard = publish_curve(system if tp == 1 else system._replace(ranks=system.ranks // tp))
    table = cost.CostTable(
        schema_version=2,
        kind="cost_table",
        metadata=cost.Metadata(synthetic=True, source=f"simulated from published figures: {system.title}"),
        routes=cost.Routes(gpu=gather, cpu=copy_curve(system)),
        publish=cost.Publish(cpu=shard, internode=across),
        contention=contention(system),
        compute=compute,
        p2p=line(PUBLISHED["copy_latency_us"]["value"], p2p),
        # Gradients are float32: twice the bytes of a gather, the same way round.
        reduce=_curve(lambda size: _read(gather, 2 * size)),
    )
    return cost.check(table)


def all_links_busy(system: System, table: cost.CostTable) -> cost.CostTable:
    """The same machine without latency and disturbance, all links of a rank as one: no schedule
    and no planner can do better. The largest rate of every curve counts."""
    rate = sum(max(p.size_bytes / p.p50_us for p in curve.points) for curve in (table.routes.gpu, table.routes.cpu))
    free = cost.Curve(points=tuple(cost.Point(size_bytes=s, p50_us=s / rate) for s in SIZES))
    return cost.check(
        msgspec.structs.replace(table, routes=cost.Routes(gpu=free), contention=(), publish=cost.Publish())
    )
