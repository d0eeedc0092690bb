"""How many bytes ``limits.device_bytes`` leaves for whole parameters at zero stage 3."""

from typing import Literal

from megatron_ext.bounds.feasibility import largest_layers
from megatron_ext.formats.errors import InputError
from megatron_ext.formats.rank_memory import kinds_text, size_text
from megatron_ext.schedule.bill_by_step import activation_peaks
from megatron_ext.schedule.group_facts import make_group
from megatron_ext.schedule.memory_bill import resting_bytes
from megatron_ext.schedule.user_defined_schedule import Group
from megatron_ext.workload.bucket_rules import buckets
from megatron_ext.workload.workload import Workload


def with_headroom(workload: Workload, shard_rests: Literal["host"] | None = None) -> Workload:
    """The workload with ``limits.whole_parameter_bytes`` lowered to what ``limits.device_bytes`` leaves for them.

    What a rank holds in addition to whole parameters is counted with its largest activations, and with the padding of
    one group per parameter, which no schedule exceeds. Below zero stage 3 nothing is lowered: all parameters are whole.

    Args:
        shard_rests: where all shards rest.

    Raises:
        InputError: not even the largest layer fits, or below zero stage 3 the parameters do not fit. The error names
            the bytes that are missing and the settings that would free some.
    """
    limits = workload.limits
    if limits.device_bytes is None:
        return workload
    layers, left = largest_layers(workload), []
    for pp_rank, held in enumerate(_held_whole(workload, shard_rests)):
        if workload.zero_stage == 3:
            held["whole_parameters"] = layers[pp_rank]
        short = sum(held.values()) - limits.device_bytes
        if short > 0:
            said = f"cannot fit: pipeline rank {pp_rank} holds at least {sum(held.values())} bytes ({kinds_text(held)})"
            said += f", {short} bytes short{_what_helps(workload, held, layers[pp_rank])}"
            raise InputError(said, field="limits.device_bytes", value=limits.device_bytes)
        most, _ = resting_bytes(groups_of_rank(workload, pp_rank, shard_rests, single=True), workload)
        left.append(limits.device_bytes - sum(most.values()) - held["activations"])
    if workload.zero_stage < 3:
        return workload
    asked = [] if limits.whole_parameter_bytes is None else [limits.whole_parameter_bytes]
    return workload.with_limits(whole_parameter_bytes=max(min(asked + left), 0))


def _held_whole(workload: Workload, shard_rests: Literal["host"] | None = None) -> list[dict[str, int]]:
    """By pipeline rank, bytes by kind with all parameters whole and with as few groups as each chunk allows."""
    found = []
    for pp_rank, activations in enumerate(activation_peaks(workload)):
        held, _ = resting_bytes(groups_of_rank(workload, pp_rank, shard_rests, single=False), workload)
        whole = sum(p.bytes for chunk in workload.chunks_of_rank(pp_rank) for p in chunk.parameters)
        found.append(held | {"whole_parameters": whole, "activations": activations})
    return found


def groups_of_rank(workload: Workload, pp_rank: int, shard_rests, *, single: bool) -> list[Group]:
    """Groups with the most padding (one a parameter) or the least (as few as a chunk allows)."""
    return [
        make_group(workload, pp_rank, chunk.model_chunk_id, part, shard_rests=shard_rests)
        for chunk in workload.chunks_of_rank(pp_rank)
        for part in ([(p,) for p in chunk.parameters] if single else buckets(chunk))
    ]


def least_of_states(workload: Workload, pp_rank: int, *, single: bool = False) -> int:
    """The least bytes of main parameters and optimizer states that any schedule keeps on the device of a rank."""
    least, _ = resting_bytes(groups_of_rank(workload, pp_rank, None, single=single), workload)
    return least["main_parameters"] + least["optimizer_states"]


def with_most_headroom(workload: Workload) -> Workload:
    """The workload with ``limits.whole_parameter_bytes`` lowered to the most that ``limits.device_bytes`` leaves under
    any schedule: gradients and shards may be elsewhere, and when a step begins there may be no activations."""
    limits = workload.limits
    if limits.device_bytes is None or workload.zero_stage < 3:
        return workload
    left = limits.device_bytes - min(least_of_states(workload, pp_rank) for pp_rank in range(workload.parallel.pp))
    most = max(left, *largest_layers(workload), 1)
    if limits.whole_parameter_bytes is not None:
        most = min(most, limits.whole_parameter_bytes)
    return workload.with_limits(whole_parameter_bytes=most)


def what_helps(workload: Workload, relieved: bool = False) -> str:
    """Settings that free bytes on the device of the rank that holds the most, each with the number of bytes.

    Args:
        relieved: shards are already counted as being off the device.
    """
    ranks = [held | ({"shards": 0} if relieved else {}) for held in _held_whole(workload)]
    return _what_helps(workload, *max(zip(ranks, largest_layers(workload)), key=lambda item: sum(item[0].values())))


def _what_helps(workload: Workload, held: dict[str, int], largest_layer: int) -> str:
    settings = []
    if held.get("shards"):
        settings.append(
            f"shards that rest in host memory free {held['shards']} (by route cpu or cpu_shard, in pinned memory)"
        )
    states = held.get("main_parameters", 0) + held.get("optimizer_states", 0)
    if states:
        settings.append(f"--optimizer-cpu-offload frees {size_text(states)}")
    if workload.zero_stage == 1 and held["gradients"]:
        settings.append(f"--zero-stage 2 frees a part of the gradients' {size_text(held['gradients'])}")
    if workload.zero_stage < 3:
        parallel = workload.parallel
        shards = sum(p.bytes // parallel.ranks_of(p.expert) for c in workload.chunks for p in c.parameters)
        shards //= parallel.pp
        freed = held["whole_parameters"] - largest_layer - shards
        if freed > 0:
            settings.append(f"--zero-stage 3 frees up to {size_text(freed)}")
    # Whole layers are recomputed if a backward recomputes more bytes than any layer has saved.
    anew = any(chunk.recompute_bytes > max(chunk.activation_bytes, default=0) for chunk in workload.chunks)
    if held["activations"] and not anew:
        part = f"a part of the activations' {size_text(held['activations'])}"
        settings.append(f"--recompute-granularity full for every layer frees {part}")
    settings.append("with more pipeline or tensor parallel ranks each rank holds less")
    return "; " + ", ".join(settings) + "; `megatron-ext fit` finds the fastest settings that fit"
