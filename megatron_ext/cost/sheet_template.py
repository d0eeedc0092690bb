"""A data sheet to fill in: the figures in which machines with the same GPU differ, each with how to find it."""

from typing import Any

from megatron_ext.cost import hardware_sheet

HOW_TO_FIND = {
    "device.memory_bytes": "nvidia-smi --query-gpu=memory.total --format=csv, in bytes",
    "host_link.bytes_per_s": "nvidia-smi -q -d PCI under load: 1e9 x lanes at generation 3, twice that each later one",
    "host_link.efficiency": "nvbandwidth -t host_to_device_memcpy_ce, over host_link.bytes_per_s",
    "host_link.gpus_per_link": "nvidia-smi topo -m: GPUs that are PIX or PXB to each other share a way",
    "host.memory_bytes": "free -b: total",
    "host.memory_bytes_per_s": "of a node: STREAM triad on all cores; or 0.8 x 8 bytes x channels x transfers a second",
    "host.numa_nodes": "lscpu: NUMA node(s)",
    "host.cores": "lscpu: Core(s) per socket x Socket(s)",
    "host.core_bytes_per_s": "STREAM triad on all cores, over their number",
    "network.bytes_per_s": "ibstat or ethtool: rate of a node's cards / 8 / GPUs of the node",
    "drive.read_bytes_per_s": "of all drives of a node: fio --rw=read --bs=16M --iodepth=8 --direct=1",
    "drive.write_bytes_per_s": "the same with --rw=write",
}


def template(name: str) -> dict[str, Any]:
    """A sheet that extends the package's ``name``; what is not filled in is refused by its field, and what is deleted
    is as on ``name``.

    Raises:
        InputError: there is no such sheet.
    """
    base = hardware_sheet.load(name)
    made: dict[str, Any] = {"schema_version": base.schema_version, "kind": base.kind, "title": f"my {base.title}"}
    made |= {"extends": name, "gpus_per_node": base.gpus_per_node}
    known = dict(hardware_sheet.figures(base))
    for field, how in HOW_TO_FIND.items():
        section, _, figure = field.partition(".")
        if field in known:
            source = f"FILL IN, or delete for {known[field].value:g}: {how}"
            made.setdefault(section, {})[figure] = {"value": None, "origin": "measured", "source": source}
    if base.host_link.pcie is not None:
        made["host_link"]["pcie"] = None  # the rate itself is given
    return made
