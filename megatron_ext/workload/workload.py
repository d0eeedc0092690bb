"""The workload file: what is trained. ``describe`` writes it, and the planner reads it.

``chunks[].parameters`` are in execution order. ``layer`` is the number, inside its chunk, of the layer that a parameter
belongs to (an index into ``layer_kinds`` if those are given). A layer is what runs between two points at which a group
can be unsharded or resharded.
"""

import hashlib
from collections.abc import Callable
from functools import cached_property, lru_cache
from math import prod
from typing import Literal, NamedTuple

import msgspec
from msgspec.structs import replace

from megatron_ext.formats import json_files
from megatron_ext.formats.checks import Checker
from megatron_ext.formats.versions import SCHEMA_VERSION as SCHEMA_VERSION
from megatron_ext.workload.bucket_layout import ITEM_BYTES, bucket_numel
from megatron_ext.workload.optimizer_settings import OptimizerSettings
from megatron_ext.workload.parallel import Parallel

MOST_PARAMETERS = 1 << 17
"""Most parameters of all chunks together: the time for planning grows with their number."""


class Parameter(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """One parameter of a chunk as one rank holds it whole. ``bytes`` is the gathered size.

    ``shared_embedding`` marks Megatron's word-embedding weight that two pipeline ranks
    share: Megatron keeps it in a bucket of its own, so it must be a group of its own.
    ``borrowed_by`` are further layers of the chunk that compute with the parameter: an output layer that
    is tied to the embedding of the same chunk.
    ``expert`` marks a parameter of the rank's own experts (in Megatron ``allreduce`` is False, and the parameter lies
    in ``expert_parallel_buffers``). It is sharded among the ranks that hold the same experts. Other expert-parallel
    ranks hold other experts with the same names and shapes.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    layer: int = 0
    shared_embedding: bool = False
    expert: bool = False
    borrowed_by: tuple[int, ...] = ()

    @property
    def uses(self) -> tuple[int, ...]:
        """Layers of the chunk that compute with the parameter, ascending."""
        return (self.layer, *self.borrowed_by)

    @property
    def numel(self) -> int:
        return self.bytes // ITEM_BYTES[self.dtype]


class Members(NamedTuple):
    """Parameters of one group, in execution order, and what follows from them. ``uses``: the first and the last layer
    of the chunk that compute with them."""

    parameters: tuple[Parameter, ...]
    dtype: str
    numels: tuple[int, ...]
    uses: tuple[int, int]


class Chunk(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True, dict=True):
    """Parameters of one model chunk of one pipeline rank; there may be none.

    ``layer_kinds[i]`` is the kind (``embedding``, ``transformer``, ``output``, ...) of the
    chunk's layer ``i`` in execution order; it is what a cost table's ``layer_kind`` refers to.
    ``activation_bytes[i]`` is what autograd saves in layer ``i`` for the backward of one micro-batch,
    with recompute as set; empty if it was not counted. ``recompute_bytes`` is what the backward
    of one micro-batch computes again at one time, if layers are recomputed.
    """

    pp_rank: int
    model_chunk_id: int
    parameters: tuple[Parameter, ...] = ()
    layer_kinds: tuple[str, ...] = ()
    activation_bytes: tuple[int, ...] = ()
    recompute_bytes: int = 0

    @property
    def bytes(self) -> int:
        return sum(parameter.bytes for parameter in self.parameters)

    @cached_property
    def members(self) -> Callable[[tuple[str, ...]], Members]:
        """The parameters with these names, in execution order; names of no parameter are left out."""
        places = {parameter.name: place for place, parameter in enumerate(self.parameters)}

        def members(names: tuple[str, ...]) -> Members:
            found = tuple(self.parameters[place] for place in sorted(places[name] for name in names if name in places))
            uses = [layer for p in found for layer in p.uses]
            return Members(found, found[0].dtype, tuple(p.numel for p in found), (min(uses), max(uses)))

        return lru_cache(maxsize=1 << 12)(members)  # a search asks for the same groups thousands of times

    @cached_property
    def lines(self) -> str:
        """What :func:`fingerprint` reads of the chunk."""
        place = f"{self.pp_rank} {self.model_chunk_id}"
        lines = (f"{place} {p.name} {'x'.join(map(str, p.shape))} {p.dtype}\n" for p in self.parameters)
        return "".join(lines)

    @cached_property
    def num_layers(self) -> int:
        """Number of layers of the chunk; at least 1, so that every chunk has a point at which compute can wait."""
        last = max((parameter.layer for parameter in self.parameters), default=0)
        return max(last + 1, len(self.layer_kinds), 1)


EXPERTS = ".experts."
"""Part of the names of all parameters of experts, however they are sharded; not of shared experts."""


class Experts(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How tokens go to experts. A layer of kind ``moe`` has ``num_experts`` over all expert-parallel ranks, and each
    token goes to ``router_topk`` of them."""

    num_experts: int
    router_topk: int


Limit = int | None
"""A limit in bytes; ``None`` is unlimited."""


class Limits(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a plan may use; ``None`` is unlimited.

    ``device_bytes``: everything that one rank holds on its device, see the memory bill
    (``schedule/memory_bill.py``). ``whole_parameter_bytes``: whole parameters on one device at a time
    (zero stage 3). ``host_bytes``: everything that the ranks of one node hold in host memory by the memory bill.
    ``pinned_host_bytes``: host copies and staging slots of one node. ``nvme_slots``: staging slots
    per rank. ``nvme_slot_bytes``: size of each (``None``: as large as the largest group on the route).
    """

    device_bytes: Limit = None
    whole_parameter_bytes: Limit = None
    host_bytes: Limit = None
    pinned_host_bytes: Limit = None
    nvme_slots: int = 0
    nvme_slot_bytes: int | None = None


class Workload(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What is trained: parallel sizes, parameters of every chunk, and the limits of a plan.

    ``p2p_bytes`` is the size of one activation message between two pipeline stages, 0 if it is not known; with one
    stage nothing is sent. ``ramp``: when the batch grows in the course of training, the numbers of micro-batches that
    iterations have before ``parallel.num_microbatches``. ``keeps_gradients``: whole gradients must stay on the device,
    because of the options in :mod:`whole_gradients`.
    """

    schema_version: int
    kind: Literal["workload"]
    parallel: Parallel
    zero_stage: Literal[1, 2, 3]
    chunks: tuple[Chunk, ...]
    p2p_bytes: int = 0
    limits: Limits = Limits()
    optimizer: OptimizerSettings = OptimizerSettings()
    experts: Experts | None = None
    ramp: tuple[int, ...] = ()
    keeps_gradients: bool = False

    def chunk(self, pp_rank: int, model_chunk_id: int) -> Chunk:
        """The chunk of a stage. Chunks are stored sorted by (model_chunk_id, pp_rank)."""
        return self.chunks[model_chunk_id * self.parallel.pp + pp_rank]

    def chunks_of_rank(self, pp_rank: int) -> tuple[Chunk, ...]:
        return tuple(self.chunk(pp_rank, chunk) for chunk in range(self.parallel.vp))

    def with_microbatches(self, number: int) -> "Workload":
        """The workload of an iteration of ``number`` micro-batches."""
        return replace(self, parallel=replace(self.parallel, num_microbatches=number), ramp=())

    @property
    def streamed_bytes(self) -> int | None:
        """``limits.whole_parameter_bytes`` at zero stage 3, where whole parameters come and go; else None."""
        return self.limits.whole_parameter_bytes if self.zero_stage == 3 else None

    def with_limits(self, **limits: int | None) -> "Workload":
        """The workload with these limits in place of its own."""
        return replace(self, limits=replace(self.limits, **limits))


def expert_ranks(workload: Workload) -> int | None:
    """Number of ranks among which the workload's experts are sharded; None if it has no experts."""
    there = any(p.expert for chunk in workload.chunks for p in chunk.parameters)
    return workload.parallel.expert_dp if there else None


def group_ranks(parameters, parallel: Parallel) -> int:
    """Number of ranks among which a bucket of ``parameters`` is sharded: all are of experts, or none."""
    return parallel.ranks_of(bool(parameters) and parameters[0].expert)


def optimizer_bytes(workload: Workload, pp_rank: int) -> int:
    """Bytes of dense parameters for which a rank's optimizer would step as many elements as it steps for this rank's
    parameters, experts included."""
    parallel = workload.parallel
    return sum(
        parallel.as_dense(sum(p.bytes for p in chunk.parameters if p.expert is expert), parallel.ranks_of(expert))
        for chunk in workload.chunks_of_rank(pp_rank)
        for expert in (False, True)
    )


def group_bytes(parameters, parallel: Parallel) -> int:
    """Bytes of the bucket, with padding, of ``parameters`` (execution order, one dtype, all of experts or none)."""
    if not parameters:
        return 0
    item = ITEM_BYTES[parameters[0].dtype]
    return bucket_numel([p.bytes // item for p in parameters], group_ranks(parameters, parallel)) * item


def fingerprint(workload: Workload) -> str:
    """sha256 over every parameter's place, name, shape and dtype. Two models with the same
    fingerprint can train by the same schedule."""
    return hashlib.sha256("".join(chunk.lines for chunk in workload.chunks).encode()).hexdigest()


def load(path) -> Workload:
    """Read and check a workload file. Raises InputError naming file, field and value."""
    return check(json_files.load(path, Workload, versioned="workload"), file=path)


def save(path, workload: Workload) -> None:
    json_files.save(path, workload, indent=1)


def check(workload: Workload, *, file=None) -> Workload:
    """Check a workload and return it with its chunks in stage order.

    Raises:
        InputError: naming the field and its value.
    """
    parallel = workload.parallel
    parallel.check(file=file)
    for index, number in enumerate(workload.ramp):
        workload.with_microbatches(number).parallel.check(file=file, field=f"ramp[{index}]")
    checker = Checker(file)
    checker.size(workload.p2p_bytes, "p2p_bytes")
    workload.optimizer.check(file=file)
    _check_experts(workload, checker)
    for name in workload.limits.__struct_fields__:
        checker.size(getattr(workload.limits, name), f"limits.{name}")
    number = sum(len(chunk.parameters) for chunk in workload.chunks)
    if number > MOST_PARAMETERS:
        checker.refuse(f"more than {MOST_PARAMETERS} parameters", "chunks", number)
    stages = {}
    for index, chunk in enumerate(workload.chunks):
        where = f"chunks[{index}]"
        parallel.check_place(chunk.pp_rank, chunk.model_chunk_id, file=file, field=where)
        stage = chunk.model_chunk_id * parallel.pp + chunk.pp_rank
        if stage in stages:
            checker.refuse(f"pipeline rank {chunk.pp_rank}, chunk {chunk.model_chunk_id} appears twice", where)
        _check_parameters(chunk, where, checker)
        _check_activations(chunk, where, checker)
        stages[stage] = _with_dense_layers(chunk)
    # A stage that is not listed has no parameters.
    everything = tuple(
        stages.get(stage) or Chunk(pp_rank=stage % parallel.pp, model_chunk_id=stage // parallel.pp)
        for stage in range(parallel.pp * parallel.vp)
    )
    return replace(workload, chunks=everything)


def _check_experts(workload: Workload, checker: Checker) -> None:
    experts, ep = workload.experts, workload.parallel.ep
    if experts is None:
        return
    for name in ("num_experts", "router_topk"):
        checker.at_least(1, getattr(experts, name), f"experts.{name}")
        checker.size(getattr(experts, name), f"experts.{name}")
    if experts.router_topk > experts.num_experts:
        checker.refuse(f"there are {experts.num_experts} experts", "experts.router_topk", experts.router_topk)
    if experts.num_experts % ep:  # Megatron's words (arguments.py, validate_args)
        said = "Number of experts should be a multiple of expert model parallel_size."
        checker.refuse(f"{said} {ep}", "experts.num_experts", experts.num_experts)


def _check_parameters(chunk: Chunk, where: str, check: Checker) -> None:
    names, previous_layer = set(), 0
    largest = len(chunk.layer_kinds) or 1 + max((p.layer for p in chunk.parameters), default=0)
    for index, parameter in enumerate(chunk.parameters):
        field = f"{where}.parameters[{index}]"
        if parameter.name in names:
            check.refuse("appears twice", f"{field}.name", parameter.name)
        names.add(parameter.name)
        _check_size(parameter, field, check)
        if parameter.layer < previous_layer:
            said = "parameters must be in execution order: layers never decrease"
            check.refuse(said, f"{field}.layer", parameter.layer)
        if chunk.layer_kinds and parameter.layer >= largest:
            check.refuse(f"must be below {largest}, the number of layer_kinds", f"{field}.layer", parameter.layer)
        previous_layer = parameter.layer
        ascending = all(a < b for a, b in zip(parameter.uses, parameter.borrowed_by))
        if parameter.borrowed_by and (not ascending or parameter.borrowed_by[-1] >= largest):
            said = f"expected ascending layers of the chunk after layer {parameter.layer}"
            check.refuse(said, f"{field}.borrowed_by", list(parameter.borrowed_by))


def _check_size(parameter: Parameter, field: str, check: Checker) -> None:
    """Refuse a parameter whose shape, dtype and bytes do not agree."""
    item = ITEM_BYTES.get(parameter.dtype)
    if item is None:
        check.refuse(f"unknown dtype; known: {', '.join(ITEM_BYTES)}", f"{field}.dtype", parameter.dtype)
    check.size(parameter.bytes, f"{field}.bytes")
    if any(size < 1 for size in parameter.shape):
        check.refuse("sizes must be positive", f"{field}.shape", parameter.shape)
    if prod(parameter.shape) * item != parameter.bytes:
        said = f"is not shape {list(parameter.shape)} times {parameter.dtype}"
        check.refuse(said, f"{field}.bytes", parameter.bytes)


def _check_activations(chunk: Chunk, where: str, check: Checker) -> None:
    counted = chunk.activation_bytes
    if counted and (len(counted) != chunk.num_layers or min(counted) < 0):
        said = f"expected {chunk.num_layers} figures that are not negative, one per layer"
        check.refuse(said, f"{where}.activation_bytes", list(counted))
    check.size(max(counted, default=0), f"{where}.activation_bytes")
    check.size(chunk.recompute_bytes, f"{where}.recompute_bytes")


def _with_dense_layers(chunk: Chunk) -> Chunk:
    """The chunk with its layers numbered from 0 without gaps, as the rest of the package expects. Without
    ``layer_kinds`` a file may have any non-decreasing numbers, for example the model's own."""
    if chunk.layer_kinds:
        return chunk
    dense = {layer: index for index, layer in enumerate(sorted({p.layer for p in chunk.parameters}))}
    parameters = tuple(
        replace(p, layer=dense[p.layer], borrowed_by=tuple(dense[layer] for layer in p.borrowed_by if layer in dense))
        for p in chunk.parameters
    )
    return replace(chunk, parameters=parameters)
