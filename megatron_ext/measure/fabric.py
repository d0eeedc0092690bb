"""The state of one rank of a measurement: its place, its process groups, the board of all ranks, and the memory that it
shares with the node's other ranks.
"""

import mmap
import os
from collections.abc import Callable
from time import perf_counter

import torch
import torch.distributed as dist

from megatron_ext.formats.errors import InputError
from megatron_ext.measure.board import Board, SharedBoard, StoreBoard
from megatron_ext.measure.options import MIB, Options
from megatron_ext.runtime import backends, block_pages, free_host_memory, host_threads, own_device, shared_block
from megatron_ext.runtime.device import device_of
from megatron_ext.runtime.objects import gather_objects

ARENA_BYTES = 64 * MIB
"""Successive rounds go through at least this much memory. In a run one group follows another, so no group is in the
caches."""

ARENA_PART, USED_PART = 4, 0.9
"""Whole groups and their gradients take at most 1 / ARENA_PART of a rank's device memory, because layers and optimizer
steps are measured next to them. The tensors of a step take at most USED_PART of the free memory, because they do not
fill torch's blocks."""


def shared_bytes(options: Options) -> int:
    """Bytes of the block that the launcher creates and every rank maps: flags, control words,
    and one host copy per data-parallel group."""
    return _control_bytes(options) + options.world_size // options.data_parallel_size * arena_bytes(options)


def arena_bytes(options: Options) -> int:
    """Bytes of one pipeline rank's host copies, in whole pages."""
    size = options.rounded(max(options.largest, ARENA_BYTES))
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE


def _control_bytes(options: Options) -> int:
    size = SharedBoard.size_bytes(options.world_size)
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE


class Fabric:
    """One rank of a measurement.

    Args:
        block: descriptor of the memory that the node's ranks share.
        board: the board of all ranks; by default in that block, for ranks of one node.
    """

    def __init__(self, options: Options, rank: int, block: int, board: Board | None = None):
        self.options, self.rank, self.world_size = options, rank, options.world_size
        dp, of_stage = options.data_parallel_size, options.ranks_of_stage
        self.data_group, self.dp_rank = options.data_place(rank)
        self.pp_rank, stages = rank // of_stage, range(options.pipeline_model_parallel_size)
        self.node, self.local_rank = divmod(rank, options.node_size)
        use_cuda = options.uses_cuda()
        self.torch_device = own_device.take(self.local_rank) if use_cuda else torch.device("cpu")
        nodes = -(-self.world_size // options.node_size)
        self.ranks_per_device = own_device.tell_nccl(self.torch_device, nodes) if use_cuda else 1
        if use_cuda:
            self.take_processors()
        self.device = device_of(torch.empty(0, device=self.torch_device))
        self.arena_bytes = self.fitting_arena()
        self._map = shared_block.mapped(block, shared_bytes(options))
        block_pages.spread(self._map)  # like the run's host copies
        self.board = board or SharedBoard(memoryview(self._map)[: _control_bytes(options)], rank, self.world_size)
        self._host: torch.Tensor | None = None
        self.set_up_seconds: tuple[float, float] | None = None  # of making and of page-locking the node's host memory
        self.set_up_bytes = 0
        self._arena: torch.Tensor | None = None
        backend = backends.of_device(use_cuda)
        sharers = options.expert_data_parallel_size or dp
        data, experts = (
            [members for stage in stages for members in options.parallel.replicas(stage, ranks)]
            for ranks in (dp, sharers)
        )
        self.data, self.data_busy = (self._own_group(data, backend) for _ in range(2))
        self.experts = self._own_group(experts, backend) if sharers != dp else self.data
        pipes = [range(first, self.world_size, of_stage) for first in range(of_stage)]
        self.pipe, self.pipe_busy = (self._own_group(pipes, backend) if len(stages) > 1 else None for _ in range(2))
        own = options.parallel.of_instance
        across = [range(s * of_stage + i, (s + 1) * of_stage, own) for s in stages for i in range(own)]
        self.instances, self.instances_busy = (
            self._own_group(across, backend) if of_stage > own else None for _ in range(2)
        )

    def take_processors(self) -> None:
        """Bind this rank to its device's NUMA node, and use its share of the processors there, as a run does. srun may
        have given each rank processors of its own. Collective."""
        host_threads.bind(host_threads.numa_node(self.torch_device))
        nodes = gather_objects(place := (self.node, os.sched_getaffinity(0)))
        if self.options.threads is None:
            torch.set_num_threads(host_threads.of_rank(nodes.count(place), self.options.node_size))

    def _own_group(self, lists: list[range], backend: str) -> dist.ProcessGroup:
        """Make all groups (every rank has to) and return the group that this rank is in."""
        groups = [dist.new_group([*ranks], backend=backend) for ranks in lists]
        own = next(group for group, ranks in zip(groups, lists) if self.rank in ranks)
        assert isinstance(own, dist.ProcessGroup)
        return own

    def fitting_arena(self) -> int:
        """:func:`arena_bytes`, or less if a rank's device has less room: larger groups are not measured. Collective."""
        size = arena_bytes(self.options)
        if self.torch_device.type != "cuda":
            return size
        own = torch.cuda.get_device_properties(self.torch_device).total_memory // self.ranks_per_device
        room = min(gather_objects(own)) // ARENA_PART
        return min(size, size * room // (4 * self.options.elements(size)) // mmap.PAGESIZE * mmap.PAGESIZE)

    def barrier(self) -> None:
        """Return when every rank has called it."""
        self.board.barrier()

    def agree(self, value: int) -> int:
        """Rank 0's ``value``, on every rank."""
        if self.rank == 0:
            self.board.post(0, value)
        self.board.barrier()
        agreed = self.board.read(0)
        self.board.barrier()
        return agreed

    # -- memory -----------------------------------------------------------------------------

    @property
    def host(self) -> torch.Tensor:
        """The node's host copy of this data-parallel group, float32, shared by its ranks."""
        if self._host is None:
            size = self.arena_bytes
            first = self.node * self.options.node_size
            there = range(first, min(first + self.options.node_size, self.world_size))
            group_of = {place: self.options.data_place(place)[0] for place in there}
            groups = {*group_of.values()}
            free_host_memory.require(len(groups) * size, f"host copies of groups of {size} bytes")
            offset = _control_bytes(self.options) + self.data_group * size
            self._host = torch.frombuffer(self._map, dtype=torch.float32, count=size // 4, offset=offset)
            mates = [place for place, group in group_of.items() if group == self.data_group]
            self.barrier()
            start = perf_counter()
            block_pages.make_pages(self._map, mates.index(self.rank), len(mates), region=(offset, size))
            made = perf_counter()
            self.barrier()
            self._host.sum()  # every rank maps the pages before timing, as a run does in its first iteration
            self.barrier()
            begin = perf_counter()
            self.device.pin(self._host)
            self.set_up_seconds = made - start, perf_counter() - begin
            self.set_up_bytes = len(groups) * size
        return self._host

    @property
    def arena(self) -> torch.Tensor:
        """This rank's device memory for whole groups and their gradients, float32."""
        if self._arena is None:
            self._arena = self._ones(4 * self.options.elements(self.arena_bytes))
        return self._arena

    def busy_arena(self) -> torch.Tensor:
        """Device memory for a link that is kept busy, float32, only as large as contention needs."""
        options = self.options
        message = 4 * options.seq_length * options.micro_batch_size * options.hidden_size
        largest = min(self.arena_bytes, options.rounded(max(ARENA_BYTES, message)))
        return self._ones(4 * options.elements(largest))

    def has_room(self, host_bytes: int, device_bytes: int) -> bool:
        """Whether this rank can allocate ``host_bytes`` and ``device_bytes`` in its part of the free memory."""
        host = free_host_memory.available_bytes()
        if self.torch_device.type != "cuda":
            host_bytes += device_bytes
        elif device_bytes > USED_PART * self._free_bytes():
            return False
        return host is None or host_bytes * self.options.node_size <= host

    def _free_bytes(self) -> int:
        """This rank's part of the free bytes on its device, plus the free bytes that torch holds."""
        kept = torch.cuda.memory_reserved(self.torch_device) - torch.cuda.memory_allocated(self.torch_device)
        return torch.cuda.mem_get_info(self.torch_device)[0] // self.ranks_per_device + kept

    def _ones(self, size_bytes: int) -> torch.Tensor:
        if self.torch_device.type == "cuda" and size_bytes > (free := self._free_bytes()):
            why = f"a group of this size does not fit on the device, which has {free} bytes left for a rank"
            raise InputError(why, field="--max-bytes or --also-sizes", value=size_bytes)
        return torch.ones(size_bytes // 4, device=self.torch_device)

    def window(self, memory: torch.Tensor, size_bytes: int, round_index: int) -> torch.Tensor:
        """A group of ``size_bytes`` in ``memory``; successive rounds use adjacent places."""
        numel = size_bytes // 4
        return memory.narrow(0, round_index % (memory.numel() // numel) * numel, numel)

    def shard(self, whole: torch.Tensor, ranks: int | None = None) -> torch.Tensor:
        """This rank's shard among the data-parallel ranks, or among the ``ranks`` of them that hold the same experts: a
        view of ``whole`` as in Megatron's buckets."""
        ranks, of_all = ranks or self.options.data_parallel_size, self.options.parallel.of_instance
        numel = whole.numel() // ranks
        return whole.narrow(0, self.rank % of_all // (of_all // ranks) * numel, numel)


def shared_fabric(options: Options, rank: int, exchange: Callable[[object], list], store, everyone, *, field: str):
    """The fabric of a rank that a launcher has started. Collective.

    Args:
        exchange, everyone: see :func:`megatron_ext.measure.cluster_launch.everyone_and_node`.
        store: the store that ranks of several nodes share.
        field: the launcher's variable with the number of ranks per node.
    """
    block = shared_block.share(shared_bytes(options), rank % options.node_size, exchange, field=field)
    board = StoreBoard(store, everyone) if options.world_size > options.node_size else None
    return Fabric(options, rank, block, board)
