"""The options of a measurement, which every rank gets: what to measure, and for which run."""

import math
import os
from typing import Literal

import msgspec

from megatron_ext.formats.checks import MOST_BYTES
from megatron_ext.formats.errors import InputError, option_error
from megatron_ext.formats.facts import Facts
from megatron_ext.workload.nodes import has_hierarchy, nodes_of_replicas
from megatron_ext.workload.parallel import Parallel

KIB, MIB = 1 << 10, 1 << 20

OF_EXPERTS = ("experts_gpu", "experts_reduce")
"""All-gathers and reduces among the ranks that hold the same experts."""

COPIES = ("gpu", "hierarchical", "symmetric", "cpu", "cpu_shard", "publish", "internode", "reduce", *OF_EXPERTS)
"""Operations that move parameters or gradients and return before they are complete."""

STEPS = ("host_step", "host_step_joined", "host_step_cast_on_device", "device_step")
"""Steps of one group, measured if the optimizer steps on the host."""

LINKS = (*COPIES, "p2p", "optimizer", "host_add", "host_memory", *STEPS, "nvme", "contention", "compute")
"""Everything that can be measured; ``--links`` chooses from it."""

NEEDS = {
    "compute": ("modules", "the script's arguments after --, or --modules"),
    "nvme": ("nvme_path", "--nvme-path DIRECTORY"),
    **dict.fromkeys(STEPS, ("optimizer_on_host", "--optimizer-on-host")),
    **dict.fromkeys(OF_EXPERTS, ("expert_data_parallel_size", "arguments of a model with experts after --")),
}
"""Links that need another option: its field, and how it is given."""

MOST_THREADS, MOST_SECONDS = 4096, 86_400
"""Limits of the threads of one rank and of the seconds of one measurement."""


MOST_OVER = 1.2
"""A measurement may take this many times the time that was asked for, once its ranks have started."""


RANKS = ("data_parallel_size", "pipeline_model_parallel_size", "tensor_model_parallel_size")
SHAPE = ("hidden_size", "seq_length", "micro_batch_size")


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Options of one measurement.

    Attributes:
        data_parallel_size, num_distributed_optimizer_instances, pipeline_model_parallel_size,
        tensor_model_parallel_size: ranks of the run; the first counts one instance. All of them are started, so that
            the node is as busy as in the run.
        expert_data_parallel_size: ranks that share the shards of the same experts, if they are not the data-parallel
            ranks.
        whole_part: the part of ``max_rank_bytes`` that the rank has as whole parameters. ``max_rank_bytes`` counts
            experts as dense parameters with shards of the same size.
        device: ``auto`` uses CUDA if torch sees a CUDA device.
        min_bytes, max_bytes: limits of the factor-2 grid (bytes of the whole group).
        also_sizes: further sizes at which gathers are measured, in addition to the grid.
        max_rank_bytes: largest ``optimizer`` size: whole parameters of one rank.
        seconds: time for measuring, not counting the start of the processes.
        threads: processor threads of one rank. None: on CUDA as many as a run uses for the host's step and additions,
            otherwise OMP_NUM_THREADS, or one.
        hidden_size, seq_length, micro_batch_size: shapes of the matrix products that stand for compute
            in contention.
        modules, module_args: ``package.module:function`` that returns layer runners (see
            :mod:`megatron_ext.measure.layer_times`), and the arguments that it is called with.
        parameter_bytes: bytes of one element of whole parameters, as in the run; None is 2 on CUDA and 4 otherwise.
        optimizer_on_host: the optimizer steps in host memory, as with ``--optimizer-cpu-offload``.
        nvme_path: a directory on the drive; without it route ``nvme`` is not measured.
        sequence_parts: parts that context parallelism divides a sequence into. The runners' layers have all of them.
        keep_path: file for results so far, until the measurement is complete; see kept_measurement.py.
        ranks_per_node: ranks that share a node; None means all ranks. A launcher sets it.
    """

    data_parallel_size: int = 2
    num_distributed_optimizer_instances: int = 1
    pipeline_model_parallel_size: int = 1
    tensor_model_parallel_size: int = 1
    expert_data_parallel_size: int | None = None
    whole_part: float = 1.0
    device: Literal["auto", "cpu", "cuda"] = "auto"
    min_bytes: int = 4 * KIB
    max_bytes: int = 256 * MIB
    also_sizes: tuple[int, ...] = ()
    max_rank_bytes: int | None = None
    seconds: float = 90.0
    threads: int | None = None
    hidden_size: int = 512
    seq_length: int = 128
    micro_batch_size: int = 1
    links: tuple[str, ...] = LINKS
    modules: str | None = None
    module_args: tuple[str, ...] = ()
    parameter_bytes: Literal[2, 4] | None = None
    optimizer_on_host: bool = False
    nvme_path: str | None = None
    ranks_per_node: int | None = None
    sequence_parts: int = 1
    keep_path: str | None = None

    @property
    def node_size(self) -> int:
        """The number of ranks on one node."""
        return self.ranks_per_node or self.world_size

    def uses_cuda(self) -> bool:
        """Whether the ranks use CUDA devices. Raises InputError if they should and there is none."""
        from megatron_ext.runtime.device import has_cuda  # torch takes a while to import

        if self.device == "cuda" and not has_cuda():
            raise option_error("device", "torch sees no CUDA device here", "cuda")
        return self.device != "cpu" and has_cuda()

    @property
    def rank_threads(self) -> int:
        """The number of processor threads of one rank, if all ranks of a node share its processors."""
        if self.threads is not None:
            return self.threads
        if self.uses_cuda():
            from megatron_ext.runtime import host_threads

            return host_threads.of_rank(self.node_size, self.node_size)
        said = os.environ.get("OMP_NUM_THREADS", "")
        return int(said) if said.isdecimal() and int(said) else 1

    def facts(self) -> Facts:
        """The options as facts for files: several values become one text, and ``keep_path`` is left out."""
        return {
            name: " ".join(map(str, value)) if isinstance(value, (list, tuple)) else value
            for name, value in msgspec.to_builtins(self).items()
            if name != "keep_path"
        }

    def elements(self, size_bytes: int) -> int:
        """The number of elements in ``size_bytes`` of whole parameters. Gradients, main parameters and moments have the
        same number."""
        return size_bytes // (self.parameter_bytes or (2 if self.uses_cuda() else 4))

    @property
    def largest(self) -> int:
        """Bytes of the largest group that is measured."""
        return self.rounded(max((self.max_bytes, *self.also_sizes)))

    @property
    def largest_shards(self) -> int:
        """Bytes of dense parameters with shards as large as those of the largest group, which may be one of experts."""
        dp = self.data_parallel_size
        return self.max_bytes * dp // min(self.expert_data_parallel_size or dp, dp)

    @property
    def world_size(self) -> int:
        """The number of ranks that measure, as many as train."""
        return self.ranks_of_stage * self.pipeline_model_parallel_size

    @property
    def ranks_of_stage(self) -> int:
        """The number of ranks of one pipeline rank, over all instances. They are next to each other."""
        return self.data_parallel_size * self.num_distributed_optimizer_instances * self.tensor_model_parallel_size

    def data_place(self, rank: int) -> tuple[int, int]:
        """(number of the data-parallel group of ``rank``, its place in it). The order is Megatron's, tp-cp-ep-dp-pp."""
        instance, own = divmod(rank, self.parallel.of_instance)
        dp_rank, tp_rank = divmod(own, self.tensor_model_parallel_size)
        return instance * self.tensor_model_parallel_size + tp_rank, dp_rank

    @property
    def peers(self) -> list[int | None]:
        """For each rank the one with which it exchanges messages, None for a stage that is left over. Stages are paired
        from the first on, or from the second if otherwise no message would go from one node to another."""
        even, odd = ([self._peer(rank, shift) for rank in range(self.world_size)] for shift in (0, 1))
        cross, others_cross = (
            any(p is not None and p // self.node_size != rank // self.node_size for rank, p in enumerate(found))
            for found in (even, odd)
        )
        return odd if others_cross and not cross else even

    def _peer(self, rank: int, shift: int) -> int | None:
        stage, own = divmod(rank, self.ranks_of_stage)
        other, pp = ((stage + shift) ^ 1) - shift, self.pipeline_model_parallel_size
        other = other % pp if pp % 2 == 0 else other
        return other * self.ranks_of_stage + own if 0 <= other < pp else None

    @property
    def parallel(self) -> Parallel:
        """The run's ranks on their nodes."""
        return Parallel(
            pipeline_model_parallel_size=self.pipeline_model_parallel_size,
            data_parallel_size=self.data_parallel_size * self.num_distributed_optimizer_instances,
            tensor_model_parallel_size=self.tensor_model_parallel_size,
            num_distributed_optimizer_instances=self.num_distributed_optimizer_instances,
            num_microbatches=1,
            gpus_per_node=self.node_size,
            order="1f1b",
        )

    @property
    def nodes(self) -> int:
        """The number of nodes that every data-parallel group spans; 0 if groups differ or spread unevenly."""
        try:
            of_stages = map(self.parallel.replicas, range(self.pipeline_model_parallel_size))
            counts = {len(nodes_of_replicas(self.parallel, sets[0])) for sets in of_stages}
        except InputError:
            return 0
        return counts.pop() if len(counts) == 1 else 0

    @property
    def has_hierarchy(self) -> bool:
        """Whether hierarchical all-gathers are possible: between nodes first, then inside each node."""
        return all(has_hierarchy(self.parallel, rank) for rank in range(self.pipeline_model_parallel_size))

    def has(self, link: str) -> bool:
        """Whether the run has a link, or steps, of this name."""
        return {
            "p2p": self.pipeline_model_parallel_size > 1,
            "internode": self.nodes > 1,
            "hierarchical": self.has_hierarchy,
            "cpu_shard": self.data_parallel_size > 1,
            "nvme": self.nvme_path is not None,
            **dict.fromkeys(STEPS, self.optimizer_on_host),
            **dict.fromkeys(OF_EXPERTS, self.expert_data_parallel_size is not None),
        }.get(link, True)

    def rounded(self, size_bytes: int) -> int:
        """Bytes of the bucket that holds ``size_bytes`` of float32: Megatron pads to lcm(DP, 128) elements. Experts may
        be sharded among another number of ranks."""
        step = math.lcm(self.data_parallel_size, self.expert_data_parallel_size or 1, 128) * 4
        return -(-size_bytes // step) * step

    @staticmethod
    def parse_sizes(text: str) -> tuple[int, ...]:
        """The value of ``--also-sizes`` as numbers. Raises InputError on anything else."""
        try:
            return tuple(int(part) for part in text.split(","))
        except ValueError:
            why = "expected whole numbers of bytes, separated by commas"
            raise InputError(why, file="--also-sizes", value=text) from None

    def check(self, *, chosen: bool = False) -> "Options":
        """Raise InputError that names the option, if a value cannot be measured. ``chosen``: the user chose ``links``,
        so every option that one of them needs must be given."""
        for name in (*RANKS, "threads", *SHAPE):
            if (value := getattr(self, name)) is not None and value < 1:
                raise option_error(name, "must be at least 1", value)
        self._check_largest()
        of_instance = self.parallel.of_instance
        if of_instance % (self.expert_data_parallel_size or 1):
            why = f"ranks that share the same experts do not divide the {of_instance} ranks of a stage"
            raise option_error("data_parallel_size", f"{self.expert_data_parallel_size} {why}", self.data_parallel_size)
        if (self.max_rank_bytes or 0) < 0:
            raise option_error("max_rank_bytes", "must not be negative", self.max_rank_bytes)
        if self.node_size > 64:
            ranks = f"makes {self.node_size} ranks on this node, more than 64 ranks on one node"
            raise option_error("data_parallel_size", ranks, self.data_parallel_size)
        if not 512 <= self.min_bytes <= self.max_bytes:
            raise option_error("min_bytes", f"must be between 512 and --max-bytes {self.max_bytes}", self.min_bytes)
        if any(size < 512 for size in self.also_sizes):
            raise option_error("also_sizes", "must be at least 512", min(self.also_sizes))
        if not math.isfinite(self.seconds) or self.seconds < 1:
            raise option_error("seconds", "must be a number of at least 1", self.seconds)
        unknown = sorted(set(self.links) - set(LINKS))
        if unknown or not self.links:
            raise option_error("links", f"known: {', '.join(LINKS)}", ",".join(unknown))
        if self.modules is not None and self.modules.count(":") != 1:
            raise option_error("modules", "expected package.module:function or file.py:function", self.modules)
        for link in self.links if chosen else ():
            field, how = NEEDS.get(link, ("links", ""))
            stood_for = link == "compute" and "contention" in self.links  # measured with products of matrices
            if not getattr(self, field) and not stood_for:
                raise option_error("links", f"needs {how}", link)
        return self

    def _check_largest(self) -> None:
        """Refuse sizes that this machine's memory cannot hold, and a measurement that would not end."""
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        activation = 4 * self.seq_length * self.micro_batch_size * self.hidden_size
        sizes = {"also_sizes": max(self.also_sizes, default=0), "max_bytes": self.max_bytes}
        sizes |= {"hidden_size": 4 * self.hidden_size**2, "seq_length": activation}
        for name, size in sizes.items():
            if size > memory:
                message = f"takes {size} bytes, more than this machine's memory of {memory} bytes"
                raise option_error(name, message, getattr(self, name))
        for name, most in (("threads", MOST_THREADS), ("seconds", MOST_SECONDS), ("max_rank_bytes", MOST_BYTES)):
            if (getattr(self, name) or 0) > most:
                raise option_error(name, f"must be at most {most}", getattr(self, name))
