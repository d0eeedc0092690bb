"""Checks whether a workload can fit its limits at all, and which routes it can use. An error names the rank, the step
and the missing bytes."""

from megatron_ext.formats.checks import Checker
from megatron_ext.formats.errors import InputError
from megatron_ext.simulator.timing import Timing
from megatron_ext.workload.bucket_rules import buckets, layer_buckets
from megatron_ext.workload.nodes import check_spread
from megatron_ext.workload.route import ROUTE_KINDS, Route
from megatron_ext.workload.workload import Workload, group_bytes


def check_fits(workload: Workload) -> None:
    """Refuse a workload that no schedule can train within ``limits.whole_parameter_bytes``.

    Zero stage 1 keeps all parameters of a rank whole; zero stage 3 needs memory for the
    largest layer.

    Raises:
        InputError: naming the pipeline rank, the step and the bytes that are missing; or the
            limit that contradicts another.
    """
    check_limits(workload)
    limit = workload.limits.whole_parameter_bytes
    if limit is None:
        return
    parallel = workload.parallel
    for pp_rank in range(parallel.pp):
        if workload.zero_stage < 3:
            chunks = workload.chunks_of_rank(pp_rank)
            need = sum(group_bytes(part, parallel) for chunk in chunks for part in buckets(chunk))
            where = f"pipeline rank {pp_rank} keeps {need} bytes of whole parameters from its first step on"
        else:
            layers = list(_layers(workload, pp_rank))
            # Name the first layer that does not fit: training would stop there.
            need, chunk, layer = next((item for item in layers if item[0] > limit), (0, 0, 0))
            stage = chunk * parallel.pp + pp_rank
            where = f"pipeline rank {pp_rank}, step {stage}F0: layer {layer} alone needs {need} bytes"
        if need > limit:
            said = f"cannot fit: {where}, {need - limit} bytes short"
            raise InputError(said, field="limits.whole_parameter_bytes", value=limit)


def check_limits(workload: Workload) -> None:
    """Raise InputError that names the field if the workload's limits contradict each other."""
    limits = workload.limits
    check, slot_bytes = Checker(), limits.nvme_slot_bytes
    if slot_bytes is not None and not limits.nvme_slots:
        check.refuse("there are no nvme_slots of this size", "limits.nvme_slot_bytes", slot_bytes)
    if limits.nvme_slots and slot_bytes == 0:
        check.refuse("slots of 0 bytes hold nothing", "limits.nvme_slot_bytes", 0)
    ranks = min(workload.parallel.node_size, workload.parallel.world_size)
    staging = limits.nvme_slots * (slot_bytes or 0) * ranks
    if limits.pinned_host_bytes is not None and staging > limits.pinned_host_bytes:
        said = f"the staging slots of a node's {ranks} ranks alone need {staging} bytes"
        check.refuse(said, "limits.pinned_host_bytes", limits.pinned_host_bytes)


def largest_layers(workload: Workload) -> list[int]:
    """By pipeline rank, the bytes of the layer that needs the most whole parameters at once; 0 without parameters."""
    return [max((size for size, *_ in _layers(workload, rank)), default=0) for rank in range(workload.parallel.pp)]


def _layers(workload: Workload, pp_rank: int):
    for chunk in workload.chunks_of_rank(pp_rank):
        layers: dict[int, int] = {}
        for part in layer_buckets(chunk):
            size = group_bytes(part, workload.parallel)
            for layer in range(part[0].layer, max(p.uses[-1] for p in part) + 1):  # shared: until its last use
                layers[layer] = layers.get(layer, 0) + size
        for layer, size in sorted(layers.items()):
            yield size, chunk.model_chunk_id, layer


def usable_routes(workload: Workload, timing: Timing) -> tuple[Route, ...]:
    """Routes that the table offers, the limits allow and the nodes can use."""
    limits = workload.limits
    copies = limits.pinned_host_bytes != 0 and spreads_evenly(workload)
    return tuple(
        kind.name
        for kind in ROUTE_KINDS.values()
        if timing.offers(kind.name)
        and (copies or kind.gathers)
        and (limits.nvme_slots or not kind.staged)
        and not kind.shard_from_host  # takes the place of all-gathers if shards rest in host memory
    )


def spreads_evenly(workload: Workload) -> bool:
    """Whether all nodes have the same number of a group's replicas, which host copies require."""
    try:
        check_spread(workload.parallel)
    except InputError:
        return False
    return True
