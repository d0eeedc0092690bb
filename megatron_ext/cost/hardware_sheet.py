"""The data sheet of a machine that nobody has measured yet: its rates and latencies, and the share of them that
programs reach.

Sheets of common machines are in ``hardware/`` next to this file and are selected by name. Rates are bytes (or
floating-point operations) per second in one direction, as in the manufacturer's data sheet. ``efficiency`` is the share
that programs reach.
"""

import math
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import msgspec

from megatron_ext.formats import json_files
from megatron_ext.formats.checks import Checker
from megatron_ext.formats.errors import InputError
from megatron_ext.formats.versions import check_version

FOLDER = Path(__file__).parent / "hardware"


class Figure(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """One figure with the range that it may lie in (``low`` and ``high``). Without a range it counts as exact.

    ``origin``: ``published`` by the source, ``derived`` from published figures as ``source`` says, ``measured`` on such
    a machine, or ``assumed``.
    """

    value: float
    origin: Literal["published", "derived", "measured", "assumed"]
    source: str
    low: float | None = None
    high: float | None = None

    @property
    def ends(self) -> tuple[float, float]:
        """The lowest and the highest value."""
        return (self.value if self.low is None else self.low, self.value if self.high is None else self.high)


class Drive(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """All drives of one node together."""

    read_bytes_per_s: Figure
    write_bytes_per_s: Figure
    latency_us: Figure


class DeviceFigures(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One GPU. ``flop_per_s``: dense matrix products by dtype. ``attention_efficiency``: the share that fused attention
    reaches (default: ``flop_efficiency``). ``kernel_us``: the shortest time of one kernel."""

    memory_bytes: Figure
    memory_bytes_per_s: Figure
    memory_efficiency: Figure
    flop_per_s: dict[str, Figure]
    flop_efficiency: Figure
    kernel_us: Figure
    attention_efficiency: Figure | None = None


class LinkFigures(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """NVLink of one GPU; with more fields, the network. ``hop_us``: time that one more rank in a ring adds to a
    collective."""

    bytes_per_s: Figure
    efficiency: Figure
    hop_us: Figure


class Pcie(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The PCIe slot of one GPU. Its rate must be equal to the rate of the link."""

    generation: Figure
    lanes: Figure

    @property
    def bytes_per_s(self) -> float:
        """Bytes per second in one direction: generation 3 moves 1 GB/s per lane, each later one twice as much."""
        return 1e9 * 2 ** (self.generation.value - 3) * self.lanes.value


class HostLink(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The link of a GPU to its host's memory (PCIe, or NVLink-C2C). ``gpus_per_link`` GPUs share the path to memory.
    ``copy_us`` is the latency of a copy. ``efficiency`` is for copies of page-locked memory, ``pageable_efficiency``
    for copies of other memory. ``collective_efficiency`` and ``hop_us`` are for collectives without NVLink."""

    bytes_per_s: Figure
    efficiency: Figure
    pageable_efficiency: Figure
    gpus_per_link: Figure
    copy_us: Figure
    collective_efficiency: Figure
    hop_us: Figure
    pcie: Pcie | None = None


OVER_TCP = Figure(value=1e9, low=4e8, high=4e9, origin="assumed", source="1.07e9 over 40 Gb/s: pytorch/gloo issue 248")
"""Bytes per second that one rank receives over TCP, of eight on a node. At the low end they share an Ethernet card of
25 Gb/s, at the high end each has a stream of 32 Gb/s, as tuned hosts reach on a card of 100 Gb/s
(fasterdata.es.net)."""


class Network(LinkFigures, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One GPU's share of the network between nodes. ``shares_host_link``: its card shares a link with host copies.
    ``tcp_bytes_per_s``: what a rank receives over TCP while all ranks of its node do. Published shards travel so."""

    shares_host_link: bool
    tcp_bytes_per_s: Figure = OVER_TCP


class Host(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Memory and processors of one node's host.

    ``memory_bytes_per_s``: bytes that all processors and devices of a node together read and write per second.
    ``core_bytes_per_s``: bytes of one core while all cores work. A rank's memory is on one of ``numa_nodes``.
    ``adam_efficiency``: the share of these rates that Megatron's host optimizer reaches. ``joined_efficiency``: the
    share that a run reaches, whose tensors are adjacent in memory. ``layer_us``: time for which launching one layer's
    forward, or its backward, from Python keeps the training thread busy. ``tensor_us``: time that Megatron's optimizer
    keeps it busy for one parameter.
    """

    memory_bytes: Figure
    memory_bytes_per_s: Figure
    numa_nodes: Figure
    cores: Figure
    core_bytes_per_s: Figure
    adam_efficiency: Figure
    joined_efficiency: Figure
    layer_us: Figure
    tensor_us: Figure


class Disturbance(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Contention without a shared link: in ``A_beside_B``, the factor by which A takes longer while B runs; 1 means no
    slowdown."""

    collective_beside_copy: Figure
    copy_beside_publish: Figure
    compute_beside_collective: Figure
    compute_beside_copy: Figure


class HardwareSheet(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A machine. ``extends`` names the package's sheet that provides all figures that this sheet lacks.
    ``collective_us`` is the latency of a collective in addition to its hops. ``call_us`` is the time for which issuing
    a collective keeps the training thread busy."""

    schema_version: int
    kind: Literal["hardware_sheet"]
    title: str
    gpus_per_node: int
    device: DeviceFigures
    host_link: HostLink
    host: Host
    disturbance: Disturbance
    collective_us: Figure
    call_us: Figure
    nvlink: LinkFigures | None = None
    network: Network | None = None
    drive: Drive | None = None
    extends: str | None = None


def names() -> list[str]:
    """Names of the sheets in the package."""
    return sorted(path.stem for path in FOLDER.glob("*.json"))


def load(name_or_path) -> HardwareSheet:
    """Read and check a sheet by its name or its path. ``NAME:2`` is a part of a node with two of its GPUs.

    Raises:
        InputError: there is no such sheet (the message lists the known ones), or its content is wrong (the message
            names file, field and value).
    """
    known = ", ".join(names())
    whole, _, gpus = str(name_or_path).rpartition(":")
    if whole in names():
        return _part(load(whole), int(gpus) if gpus.isdecimal() else 0, name_or_path)
    path = FOLDER / f"{name_or_path}.json" if str(name_or_path) in names() else Path(name_or_path)
    if not os.path.isfile(path):  # Path.is_file raises if the name is too long
        said = f"is neither a file nor a known machine; known: {known}"
        raise InputError(said, field="hardware", value=str(name_or_path))
    raw = json_files.load(path, dict[str, Any])
    base = raw.get("extends")
    if base is not None:
        if str(base).partition(":")[0] not in names():
            raise InputError(f"is not a machine of the package; known: {known}", file=path, field="extends", value=base)
        raw = _merged(msgspec.to_builtins(load(base)), raw)
    elif "host" not in raw:
        raise InputError("is missing; give it, or name a sheet that has it in extends", file=path, field="host")
    sheet = json_files.decode(msgspec.json.encode(raw), HardwareSheet, file=path)
    return _check(sheet, path)


def _part(sheet: HardwareSheet, gpus: int, name) -> HardwareSheet:
    """A machine with ``gpus`` of a node's GPUs and an equal share of its cores and memory, as such machines are rented.
    The rates of memory and drives are this share if the neighbours work, and the full rate (of its NUMA nodes) if they
    are idle. The value is the geometric mean of both."""
    if not 1 <= gpus <= sheet.gpus_per_node:
        raise InputError(f"is not a part of a node of {sheet.gpus_per_node} GPUs", field="hardware", value=str(name))
    own, numa_nodes = gpus / sheet.gpus_per_node, sheet.host.numa_nodes.value
    near = math.ceil(own * numa_nodes) / numa_nodes
    parts = {"host.memory_bytes": (own, own), "host.cores": (own, own), "host.numa_nodes": (near, near)}
    parts |= {"host.memory_bytes_per_s": (own, near)}
    parts |= dict.fromkeys(("drive.read_bytes_per_s", "drive.write_bytes_per_s"), (own, 1))

    def part(field: str, figure: Figure) -> Figure:
        least, most = parts.get(field, (1, 1))
        (low, high), value = figure.ends, figure.value * math.sqrt(least * most)
        source = f"{gpus} of {sheet.gpus_per_node} GPUs of a node with {figure.value:g}: {figure.source}"
        made = Figure(value=value, origin="derived", source=source, low=low * least, high=high * most)
        return made if field in parts else figure

    title = f"{sheet.title}: a part with {gpus} of the GPUs"
    return msgspec.structs.replace(_replaced(sheet, "", part), title=title, gpus_per_node=gpus)


def _merged(base: dict, over: dict) -> dict:
    """``over`` with missing keys taken from ``base``. A figure is replaced as a unit, not field by field."""
    merged = dict(base)
    for key, value in over.items():
        both = isinstance(value, dict) and isinstance(base.get(key), dict) and "value" not in value
        merged[key] = _merged(base[key], value) if both else value
    return merged


def _check(sheet: HardwareSheet, path) -> HardwareSheet:
    check_version("hardware_sheet", sheet.schema_version, file=path)
    checker = Checker(path)
    checker.at_least(1, sheet.gpus_per_node, "gpus_per_node")
    for field, figure in figures(sheet):
        low, high = figure.ends
        for name, value in (("value", figure.value), ("low", low), ("high", high)):
            checker.positive(value, f"{field}.{name}")
            if not 1e-12 <= value <= 1e18:
                checker.refuse("is not plausible: expected 1e-12 to 1e18", f"{field}.{name}", value)
        if not low <= figure.value <= high:
            checker.refuse("is not between low and high", f"{field}.value", figure.value)
        if field.endswith("efficiency") and high > 1:
            checker.refuse("must not be above 1", f"{field}.high", high)
        if not figure.source.strip():
            checker.refuse("must not be empty", f"{field}.source", figure.source)
    pcie, rate = sheet.host_link.pcie, sheet.host_link.bytes_per_s.value
    if pcie is not None and not 0.95 <= pcie.bytes_per_s / rate <= 1.05:
        lanes = f"{pcie.lanes.value:g} lanes of PCIe {pcie.generation.value:g}, {pcie.bytes_per_s:g}"
        checker.refuse(f"is not the rate of {lanes}", "host_link.bytes_per_s.value", rate)
    return sheet


def figures(sheet: HardwareSheet) -> list[tuple[str, Figure]]:
    """Every figure of a sheet, with the name of its field."""
    found: list[tuple[str, Figure]] = []
    _replaced(sheet, "", lambda field, figure: found.append((field, figure)))
    return found


def drawn(sheet: HardwareSheet, choose: Callable[[str, Figure], float]) -> HardwareSheet:
    """The sheet with the value of every figure replaced by ``choose(field, figure)``."""
    return _replaced(sheet, "", lambda field, figure: msgspec.structs.replace(figure, value=choose(field, figure)))


def drawn_machines(sheet: HardwareSheet, count: int) -> Iterator[HardwareSheet]:
    """Machines with every figure drawn from its range, all at once (Latin hypercube sampling, McKay, Beckman and
    Conover 1979). Half of the draws of a figure lie below its value."""
    draw = random.Random(0)
    strata = {field: draw.sample(range(count), count) for field, figure in figures(sheet) if figure.low is not None}
    for number in range(count):

        def choose(field: str, figure: Figure, number=number) -> float:
            part = (strata[field][number] + draw.random()) / count if field in strata else 0.5
            low, high = figure.ends
            return figure.value * ((high if part > 0.5 else low) / figure.value) ** abs(2 * part - 1)

        yield drawn(sheet, choose)


def slow_end(field: str, figure: Figure) -> float:
    """The end of a figure's range at which times are longest: the higher one of latencies, disturbances, and numbers of
    sharers."""
    more_is_slower = field.endswith(("_us", "gpus_per_link", "numa_nodes")) or field.startswith("disturbance.")
    return figure.ends[more_is_slower]


def _replaced(node: Any, field: str, choose) -> Any:
    if isinstance(node, Figure):
        return choose(field, node)
    dot = f"{field}." if field else ""
    if isinstance(node, dict):
        return {key: _replaced(value, f"{dot}{key}", choose) for key, value in node.items()}
    if isinstance(node, msgspec.Struct):
        names = type(node).__struct_fields__
        return type(node)(**{name: _replaced(getattr(node, name), f"{dot}{name}", choose) for name in names})
    return node


HOW_TO_FIND = {
    "device.memory_bytes": "nvidia-smi --query-gpu=memory.total --format=csv, in bytes",
    "host_link.bytes_per_s": "nvidia-smi -q -d PCI under load: 1e9 x lanes x 2^(generation - 3)",
    "host_link.efficiency": "nvbandwidth -t host_to_device_memcpy_ce, divided by host_link.bytes_per_s",
    "host_link.gpus_per_link": "nvidia-smi topo -m: GPUs that are PIX or PXB to each other share a link",
    "host.memory_bytes": "free -b: total",
    "host.memory_bytes_per_s": "of a node: STREAM triad on all cores; or 0.8 x 8 bytes x channels x transfers/s",
    "host.numa_nodes": "lscpu: NUMA node(s)",
    "host.cores": "lscpu: Core(s) per socket x Socket(s)",
    "host.core_bytes_per_s": "STREAM triad on all cores, divided by their number",
    "network.bytes_per_s": "ibstat or ethtool: bits per second of all cards of a node / 8 / GPUs of a node",
    "network.tcp_bytes_per_s": "iperf3 between two nodes, a process for each GPU at once: rate of all / GPUs of a node",
    "drive.read_bytes_per_s": "of all drives of a node: fio --rw=read --bs=16M --iodepth=8 --direct=1",
    "drive.write_bytes_per_s": "the same with --rw=write",
}


def template(name: str) -> dict[str, Any]:
    """A sheet that extends the package's sheet ``name``. Reading it refuses fields that are not filled in. Fields that
    are deleted are taken from ``name``.

    Raises:
        InputError: there is no such sheet.
    """
    base = load(name)
    made: dict[str, Any] = {"schema_version": base.schema_version, "kind": base.kind, "title": f"my {base.title}"}
    made |= {"extends": name, "gpus_per_node": base.gpus_per_node}
    known = dict(figures(base))
    for field, how in HOW_TO_FIND.items():
        section, _, figure = field.partition(".")
        if field in known:
            source = f"FILL IN, or delete for {known[field].value:g}: {how}"
            made.setdefault(section, {})[figure] = {"value": None, "origin": "measured", "source": source}
    if base.network is None:  # nodes can be joined: the rate is theirs, the rest is as on sheets with a network
        source = f"FILL IN, or delete network if there is one node: {HOW_TO_FIND['network.bytes_per_s']}"
        source += "; shares_host_link: whether nvidia-smi topo -m has PIX or PXB between GPU and card; efficiency and "
        source += "hop_us are those of RDMA: over Ethernet take those of h100-ethernet"
        rate = {"value": None, "origin": "measured", "source": source}
        made["network"] = msgspec.to_builtins(load("h100-rdma").network)
        made["network"] |= {"bytes_per_s": rate, "shares_host_link": None}
    if base.host_link.pcie is not None:
        made["host_link"]["pcie"] = None  # the rate itself is given
    return made
