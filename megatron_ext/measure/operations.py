"""The transfers and the work of processors that are timed, each issued as the run issues it; all operations by name."""

from __future__ import annotations

from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from megatron_ext.formats.errors import one_line
from megatron_ext.measure.fabric import Fabric
from megatron_ext.measure.operation import DONE, Operation
from megatron_ext.measure.timed_steps import Optimizer
from megatron_ext.runtime.flags import poll, private_flags
from megatron_ext.runtime.node_exchange import IN_FLIGHT, NodeExchange
from megatron_ext.runtime.node_groups import make_data_group, make_node_groups
from megatron_ext.runtime.objects import gather_objects
from megatron_ext.runtime.routes import hierarchical_gather, shard_gather, symmetric_gather
from megatron_ext.runtime.routes.buffered_gather import BufferedGather
from megatron_ext.runtime.routes.stream_route import StreamRoute
from megatron_ext.runtime.streams import Arrival
from megatron_ext.runtime.worker import Transfer, Waitable, Worker


def coalesced(group: dist.ProcessGroup):
    """Coalesce collectives of ``group`` as Megatron does; one by one if torch lacks its private function for that."""
    manager = getattr(distributed_c10d, "_coalescing_manager", None)
    return nullcontext(DONE) if manager is None else manager(group, async_ops=True)


class TimedGather(Operation):
    """All-gather of the data-parallel group's shards, in place, as Megatron's
    ``_ParamAndGradBucketGroup.start_param_sync`` does it: in a coalescing manager."""

    name = "gpu"
    of_experts = False

    def __init__(self, fabric: Fabric, busy: bool = False):
        super().__init__(fabric, busy)
        self.ranks = fabric.options.expert_data_parallel_size if self.of_experts else None
        self.group = fabric.experts if self.of_experts else fabric.data_busy if busy else fabric.data
        self.memory = fabric.busy_arena() if busy else fabric.arena

    def issue(self, size_bytes: int, round_index: int):
        whole = self.fabric.window(self.memory, size_bytes, round_index)
        with coalesced(self.group) as manager:
            dist.all_gather_into_tensor(whole, self.fabric.shard(whole, self.ranks), group=self.group)
        return manager


class RouteGather(Operation):
    """An all-gather through a buffer by ``gather``, an object of the run's routes."""

    gather: BufferedGather

    def issue(self, size_bytes: int, round_index: int) -> Arrival:
        whole = self.fabric.window(self.fabric.arena, size_bytes, round_index)
        return self.gather.gather(whole, self.fabric.shard(whole), 0)


class TimedHierarchicalGather(RouteGather):
    """An all-gather in two legs, between nodes and inside them; see hierarchical_gather.py."""

    name = "hierarchical"

    def __init__(self, fabric: Fabric, busy: bool = False):
        super().__init__(fabric, busy)
        groups = make_node_groups(fabric.options.parallel, dist.get_backend(fabric.data))
        assert groups is not None  # the link is offered only if nodes and replicas make two legs
        self.threads = self.gather = hierarchical_gather.HierarchicalGather(groups, fabric.device)


class TimedSymmetricGather(RouteGather):
    """An all-gather by copy engines, through registered memory; see
    :mod:`megatron_ext.runtime.routes.symmetric_gather`."""

    name = "symmetric"

    def __init__(self, fabric: Fabric, busy: bool = False):
        super().__init__(fabric, busy)
        how = symmetric_gather.without_thread_blocks(fabric.torch_device)
        group = make_data_group(fabric.options.parallel, dist.get_backend(fabric.data), **how)
        largest = {torch.float32: min(fabric.options.largest, fabric.arena_bytes) // 4}
        self.threads = self.gather = symmetric_gather.SymmetricGather(group, fabric.device, largest)

    @classmethod
    def tried(cls, fabric: Fabric) -> tuple[TimedSymmetricGather | None, str]:
        """(the operation, ""), or (None, the reason in one line); the same on all ranks. Collective."""
        options, own, why = fabric.options, None, ""
        missing = symmetric_gather.missing(fabric.torch_device.type, options.data_parallel_size, options.nodes)
        if missing is not None:
            return None, missing
        try:
            own = cls(fabric)
        except (RuntimeError, AttributeError) as error:
            why = one_line(str(error), 300)
        everyone = gather_objects(why)
        return (None, max(everyone)) if any(everyone) else (own, "")


class TimedHostCopy(Operation):
    """The copy of a whole group from the node's host copy to the device, as the run's route makes it."""

    name = "cpu"

    def __init__(self, fabric: Fabric, busy: bool = False):
        super().__init__(fabric, busy)
        self.threads = self.route = StreamRoute(f"measure-{self.name}", fabric.device)
        self.memory = fabric.busy_arena() if busy else fabric.arena
        _ = fabric.host

    def issue(self, size_bytes: int, round_index: int) -> Waitable:
        source = self.fabric.window(self.fabric.host, size_bytes, round_index)
        return self.copy(self.fabric.window(self.memory, size_bytes, round_index), source)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> Arrival:
        """Issue one copy."""
        return self.route.copy(target, source, Arrival(self.fabric.device).begin())


class TimedShardGather(Operation):
    """The copy of the own shard from host memory, then an all-gather, as the run does it."""

    name = "cpu_shard"

    def __init__(self, fabric: Fabric, busy: bool = False):
        super().__init__(fabric, busy)
        data = make_data_group(fabric.options.parallel, dist.get_backend(fabric.data))
        self.threads = self.gather = shard_gather.ShardGather(data, fabric.device)
        _ = fabric.host

    def issue(self, size_bytes: int, round_index: int) -> Arrival:
        source = self.fabric.shard(self.fabric.window(self.fabric.host, size_bytes, round_index))
        whole = self.fabric.window(self.fabric.arena, size_bytes, round_index)
        return self.gather.gather(whole, source, self.fabric.dp_rank * source.numel())


class TimedPublish(TimedHostCopy):
    """Every rank writes its shard into the node's host copy; ``size_bytes`` is the whole group."""

    name = "publish"

    def issue(self, size_bytes: int, round_index: int) -> Waitable:
        source = self.fabric.shard(self.fabric.window(self.memory, size_bytes, round_index))
        target = self.fabric.shard(self.fabric.window(self.fabric.host, size_bytes, round_index))
        return self.copy(target, source)


class Reduce(TimedGather):
    """Reduce-scatter of a group's gradients over the data-parallel group, in place, as Megatron's
    ``_ParamAndGradBucketGroup.start_grad_sync`` does it. Gradients are first divided by the number of replicas, so that
    their sum is a mean. With several instances of the optimizer, an all-reduce of the shard among them follows.
    Gradients are float32 for every dtype of parameters."""

    name = "reduce"

    def __init__(self, fabric: Fabric, busy: bool = False):
        super().__init__(fabric, busy)
        self.instances = fabric.instances_busy if busy else fabric.instances

    def issue(self, size_bytes: int, round_index: int):
        whole = self.fabric.window(self.memory, 4 * self.fabric.options.elements(size_bytes), round_index)
        # Takes as long as dividing. Values that are divided again and again would become subnormal, which are slow.
        whole.mul_(1.0)
        shard = self.fabric.shard(whole, self.ranks)
        with coalesced(self.group) as manager:
            dist.reduce_scatter_tensor(shard, whole, group=self.group)
        if self.instances is not None:
            manager.wait()
            with coalesced(self.instances) as manager:
                dist.all_reduce(shard, group=self.instances)
        return manager


class ExpertGather(TimedGather):
    """All-gather of a group of experts among the ranks that hold the same experts."""

    name = "experts_gpu"
    of_experts = True


class ExpertReduce(Reduce):
    """Reduce-scatter of the gradients of a group of experts, among the ranks that hold the same experts."""

    name = "experts_reduce"
    of_experts = True


class Internode(Operation):
    """The exchange between nodes: the shards that a node lacks come from its ranks' counterparts on the other nodes
    into the node's host copy. ``size_bytes`` is the whole group, of which a node receives :func:`crossing_bytes`. As in
    the run, a second exchange follows while the first is on its way. The caller halves the time of both
    (``messages``)."""

    name = "internode"
    messages = IN_FLIGHT
    by_host = True

    def __init__(self, fabric: Fabric, busy: bool = False):
        super().__init__(fabric, busy)
        self.threads = self.worker = Worker(f"measure-{self.name}")
        groups = make_node_groups(fabric.options.parallel)
        assert groups is not None  # the link is offered only if the replicas are on several nodes
        self.exchange = NodeExchange(groups)
        _ = fabric.host

    def issue(self, size_bytes: int, round_index: int) -> Transfer:
        host = self.fabric.window(self.fabric.host, size_bytes, round_index)
        return self.worker.submit(lambda transfer: self._bring(host))

    def _bring(self, host: torch.Tensor) -> None:
        """Receive the other nodes' shards of ``host``, ``messages`` times."""
        exchange, numel = self.exchange, host.numel() // self.fabric.options.data_parallel_size
        shards = [host.narrow(0, dp_rank * numel, numel) for dp_rank in exchange.dp_ranks]
        for arriving in [exchange.begin(shards, self.fabric.dp_rank) for _ in range(self.messages)]:
            arriving.wait()


class PublishAcross(Internode):
    """Publishing as the run does it for a group that spans nodes: the own shard into the node's host copy, then the
    exchange with the counterparts. It is timed for contention: most of its time it uses the network, like gathers."""

    name = "publish"

    def __init__(self, fabric: Fabric, busy: bool = False):
        super().__init__(fabric, busy)
        self.memory = fabric.busy_arena() if busy else fabric.arena
        self.stream = fabric.device.stream("measure-publish-copies")
        (self.copied,), self.copies = private_flags(1, fabric.device), 0

    def issue(self, size_bytes: int, round_index: int) -> Transfer:
        fabric, device = self.fabric, self.fabric.device
        host, own = (fabric.window(memory, size_bytes, round_index) for memory in (fabric.host, self.memory))
        self.stream.wait(device.compute.record(device.event()))
        for _ in range(self.messages):
            self.stream.copy(fabric.shard(host), fabric.shard(own))
        self.copies += 1
        self.stream.store(self.copied, self.copies)

        def publish(transfer: Transfer, number: int = self.copies) -> None:
            poll(lambda: self.copied.reached(number))
            self._bring(host)

        return self.worker.submit(publish)

    def close(self) -> None:
        super().close()
        self.stream.close()


class P2P(Operation):
    """One message from an even pipeline rank to an odd one next to it (:attr:`Options.peers`), and one message back.
    The caller halves the time of both (``messages``). All pairs run at once. As in Megatron's ``P2PCommunicator``, each
    message is received into new memory."""

    name = "p2p"
    messages = 2

    def __init__(self, fabric: Fabric, busy: bool = False):
        super().__init__(fabric, busy)
        self.group = fabric.pipe_busy if busy else fabric.pipe
        self.peer = fabric.options.peers[fabric.rank]
        self.memory = fabric.busy_arena() if busy else fabric.arena

    def issue(self, size_bytes: int, round_index: int):
        if self.peer is None:
            return DONE
        message = self.fabric.window(self.memory, size_bytes, round_index)

        def send():
            return dist.isend(message, self.peer, group=self.group)

        def receive():
            return dist.irecv(torch.empty_like(message), self.peer, group=self.group)

        first, second = (send, receive) if self.fabric.pp_rank % 2 == 0 else (receive, send)
        begun = first()
        assert begun is not None  # None is for ranks outside of the group
        begun.wait()
        last = second()
        assert last is not None
        return last


class HostAdd(Operation):
    """The addition of a float32 gradient shard of ``size_bytes`` to another in host memory."""

    name = "host_add"
    builds = True
    by_host = True
    _sum = _part = torch.zeros(0)

    def issue(self, size_bytes: int, round_index: int):
        if size_bytes > self._sum.numel() * 4:
            self._sum, self._part = torch.zeros(2, size_bytes // 4).unbind()
        self._sum[: size_bytes // 4].add_(self._part[: size_bytes // 4])
        return DONE


class MatrixProduct(Operation):
    """Products of the model's shapes: (sequence * micro-batch, hidden) x (hidden, 4 hidden) and
    back, for about a millisecond. ``size_bytes`` does not matter. On a device they are in bfloat16, as in training:
    float32 would not use the tensor cores, and so would leave more memory bandwidth and power to the transfers."""

    name = "compute"

    def __init__(self, fabric: Fabric, busy: bool = False):
        super().__init__(fabric, busy)
        options = fabric.options
        rows, hidden = options.seq_length * options.micro_batch_size, options.hidden_size
        how: dict = {"device": fabric.torch_device}
        how["dtype"] = torch.float32 if fabric.torch_device.type == "cpu" else torch.bfloat16
        self.input, self.up, self.down = (
            torch.ones(*shape, **how) for shape in ((rows, hidden), (hidden, 4 * hidden), (4 * hidden, hidden))
        )
        # One processor thread has about 5e10 FLOP/s. An accelerator computes more products.
        rate = 5e10 if fabric.torch_device.type == "cpu" else 2e14
        self.products = max(int(1e-3 * rate / (16 * rows * hidden * hidden)), 1)

    def issue(self, size_bytes: int, round_index: int):
        with torch.no_grad():
            for _ in range(self.products):
                torch.mm(torch.mm(self.input, self.up), self.down)
        return DONE


GATHERS = (TimedGather, TimedHierarchicalGather, TimedSymmetricGather, TimedHostCopy, TimedShardGather)
OTHERS = (TimedPublish, Internode, Reduce, P2P, ExpertGather, ExpertReduce, Optimizer, HostAdd, MatrixProduct)
OPERATIONS = {kind.name: kind for kind in (*GATHERS, *OTHERS)}
