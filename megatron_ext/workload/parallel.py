"""Parallel sizes of a run, in Megatron's words, and which combinations Megatron accepts."""

from collections.abc import Iterable
from typing import Literal

import msgspec

from megatron_ext.formats.errors import InputError

Order = Literal["interleaved", "1f1b", "no_pipeline", "gpipe"]

LARGEST = 1 << 20
"""Largest size that a file may hold. It bounds the time and memory spent on a bad file."""

MOST_STEPS = 1 << 16
"""Most forward steps of one iteration, over all pipeline ranks. Planning takes about half a millisecond per step."""


def megatron_order(pp: int, vp: int | None) -> Order:
    """The order that Megatron runs with ``pp`` pipeline ranks of ``vp`` chunks each."""
    return "interleaved" if vp and vp > 1 else "1f1b" if pp > 1 else "no_pipeline"


class Parallel(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Parallel sizes. ``order`` names the pipeline order: Megatron's interleaved 1F1B
    (``interleaved``), 1F1B (``1f1b``), no pipelining (``no_pipeline``: forward and backward
    alternate), or all forwards before all backwards (``gpipe``). Megatron trains by the first three.

    ``data_parallel_size`` counts context-parallel ranks. Experts are spread over ``expert_model_parallel_size`` ranks,
    each cut into ``expert_tensor_parallel_size`` parts (None: the tensor-parallel size, as for other parameters).
    The replicas are divided into ``num_distributed_optimizer_instances``. Parameters are sharded over the ranks of one
    instance.
    """

    pipeline_model_parallel_size: int
    data_parallel_size: int
    num_microbatches: int
    virtual_pipeline_model_parallel_size: int = 1
    tensor_model_parallel_size: int = 1
    microbatch_group_size_per_vp_stage: int | None = None
    gpus_per_node: int | None = None
    order: Order = "interleaved"
    expert_model_parallel_size: int = 1
    expert_tensor_parallel_size: int | None = None
    num_distributed_optimizer_instances: int = 1

    @property
    def pp(self) -> int:
        return self.pipeline_model_parallel_size

    @property
    def vp(self) -> int:
        return self.virtual_pipeline_model_parallel_size

    @property
    def instances(self) -> int:
        return self.num_distributed_optimizer_instances

    @property
    def dp(self) -> int:
        """Ranks that share the shards of the same parameters: the data-parallel ranks of one instance."""
        return self.data_parallel_size // self.instances

    @property
    def ep(self) -> int:
        return self.expert_model_parallel_size

    @property
    def etp(self) -> int:
        return self.expert_tensor_parallel_size or self.tensor_model_parallel_size

    @property
    def expert_dp(self) -> int:
        """Ranks that share the shards of the same experts: Megatron's ``expert_data_parallel_size`` of one instance."""
        return self.of_instance // (self.etp * self.ep)

    @property
    def of_instance(self) -> int:
        """Number of ranks of a pipeline rank in one instance. Their global ranks are consecutive."""
        return self.world_size // (self.pp * self.instances)

    def ranks_of(self, expert: bool) -> int:
        """Number of ranks among which a parameter is sharded."""
        return self.expert_dp if expert else self.dp

    def as_dense(self, size_bytes: int, ranks: int) -> int:
        """Bytes of a dense group whose shards are as large as those of ``size_bytes`` sharded among ``ranks``."""
        return size_bytes * self.dp // ranks

    def replicas(self, pp_rank: int, ranks: int | None = None) -> list[range]:
        """Sets of global ranks of a pipeline rank that share the shards of the same parameters.

        The order is Megatron's, ``tp-cp-ep-dp-pp``. Dense parameters have one set for each tensor-parallel rank.
        Experts have one set for each pair of expert-parallel and expert-tensor-parallel rank, the latter varying
        fastest. The sets of the next instance, which holds the same parameters, follow. A rank's place in its set is
        its (expert) data-parallel rank in the instance.

        Args:
            ranks: ranks of a set: ``dp`` (the default) or ``expert_dp``.
        """
        own, apart = self.of_instance, self.of_instance // (ranks or self.dp)
        firsts = [number * own for number in range(pp_rank * self.instances, (pp_rank + 1) * self.instances)]
        return [range(first + start, first + own, apart) for first in firsts for start in range(apart)]

    def nodes_of(self, ranks: Iterable[int]) -> list[int]:
        """The node of each of these global ranks."""
        return [rank // self.node_size for rank in ranks]

    @property
    def microbatch_group_size(self) -> int:
        """Micro-batches that a chunk runs before the next chunk takes over; Megatron's default is PP."""
        return self.microbatch_group_size_per_vp_stage or self.pp

    @property
    def world_size(self) -> int:
        return self.pp * self.data_parallel_size * self.tensor_model_parallel_size

    @property
    def node_size(self) -> int:
        """Ranks that share one node and its host memory."""
        return self.gpus_per_node or self.world_size

    @property
    def num_nodes(self) -> int:
        return -(-self.world_size // self.node_size)

    def global_rank(self, pp_rank: int, dp_rank: int) -> int:
        """Global rank of the first tensor-parallel rank, in Megatron's default order ``tp-cp-ep-dp-pp``."""
        return (pp_rank * self.data_parallel_size + dp_rank) * self.tensor_model_parallel_size

    def check_place(self, pp_rank: int, model_chunk_id: int, *, file=None, field: str, error=InputError) -> None:
        """Raise ``error`` if there is no such pipeline rank or model chunk; it names the entry below ``field``."""
        for name, value, size, what in (
            ("pp_rank", pp_rank, self.pp, "pipeline size"),
            ("model_chunk_id", model_chunk_id, self.vp, "virtual pipeline size"),
        ):
            if not 0 <= value < size:
                raise error(f"must be below the {what} {size}", file=file, field=f"{field}.{name}", value=value)

    def check(self, *, file=None, field: str = "parallel") -> None:
        """Refuse sizes that Megatron refuses.

        Raises:
            InputError: naming the field and its value.
        """

        def refuse(name: str, message: str) -> None:
            raise InputError(message, file=file, field=f"{field}.{name}", value=getattr(self, name))

        for name in self.__struct_fields__:
            value = getattr(self, name)
            if name != "order" and value is not None and not 1 <= value <= LARGEST:
                refuse(name, f"must be between 1 and {LARGEST}")
        if self.world_size > LARGEST:
            refuse("data_parallel_size", f"more than {LARGEST} ranks")
        if self.world_size % (model := self.etp * self.ep * self.pp):
            # Megatron's words (parallel_state.py, initialize_model_parallel).
            said = f"not divisible by expert_tensor_model_pipeline_parallel size ({model})"
            refuse("expert_model_parallel_size", f"world_size ({self.world_size}) is {said}")
        for kind, size in (("data", self.data_parallel_size), ("expert-data", self.world_size // model)):
            if size % self.instances:
                refuse("num_distributed_optimizer_instances", f"does not divide the {size} {kind}-parallel ranks")
        if self.pp * self.vp * self.num_microbatches > MOST_STEPS:
            refuse("num_microbatches", f"more than {MOST_STEPS} forward steps in one iteration")
        if self.order == "no_pipeline" and self.pp != 1:
            refuse("pipeline_model_parallel_size", "must be 1 with order no_pipeline")
        if self.order in ("1f1b", "no_pipeline") and self.vp != 1:
            refuse("virtual_pipeline_model_parallel_size", f"must be 1 with order {self.order}")
        if self.order == "interleaved":
            for name in ("pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size"):
                if getattr(self, name) < 2:
                    refuse(name, "must be at least 2 with order interleaved")
            # The same two rules as in Megatron's interleaved schedule.
            group, most = self.microbatch_group_size, self.num_microbatches
            if not self.pp <= group <= most:
                given = self.microbatch_group_size_per_vp_stage is not None
                said = f"needs pipeline size {self.pp} <= micro-batch group {group} <= {most} micro-batches"
                refuse("microbatch_group_size_per_vp_stage" if given else "num_microbatches", said)
            if 0 < most % group < self.pp:
                said = f"leaves a last group of {most % group}, smaller than the pipeline size {self.pp}"
                refuse("num_microbatches", said)
        if self.world_size % self.node_size and self.world_size > self.node_size:
            refuse("gpus_per_node", f"does not divide the {self.world_size} ranks")
