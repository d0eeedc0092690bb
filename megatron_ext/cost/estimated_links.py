"""Times of links from a data sheet, as straight lines in bytes, for the parallel sizes of a run.

[Note: A ring over nodes]
An all-gather of ``n`` ranks brings ``(n - 1) / n`` of the group to every rank over its NVLink (or, without NVLink, over
its host link). If the ranks are on several nodes, ``(n - 1) / n`` of the group also enters every node through the
network cards of its ranks. NCCL's ring passes every part on from rank to rank, so the parts of a node's own ranks go
around the ring as well. The slower of the two transfers determines the time. All groups of a node are gathered at the
same time, each through the cards of its own ranks. Published all-gathers of 16 ranks on two nodes: 351 GB/s with cards
of 400 GB/s, 201 with 200, 54 with 50.
"""

from math import inf
from typing import NamedTuple

from megatron_ext.cost.cost_table import Contention
from megatron_ext.cost.hardware_sheet import HardwareSheet
from megatron_ext.formats.errors import InputError
from megatron_ext.workload.nodes import nodes_spanned
from megatron_ext.workload.parallel import Parallel


class Line(NamedTuple):
    """A straight line: a latency ``us`` plus ``us_per_byte``."""

    us: float
    us_per_byte: float

    def at(self, size_bytes: float) -> float:
        return self.us + size_bytes * self.us_per_byte

    def scaled(self, factor: float) -> "Line":
        """The line for ``factor`` times the bytes."""
        return Line(self.us, self.us_per_byte * factor)


class SheetLinks:
    """The links of ``sheet``, as a run with ``parallel`` uses them.

    Raises:
        InputError: the ranks do not fit the machine's nodes.
    """

    def __init__(self, sheet: HardwareSheet, parallel: Parallel):
        self.sheet, self.parallel = sheet, parallel
        self.ranks_per_node = min(parallel.node_size, parallel.world_size)
        if self.ranks_per_node > sheet.gpus_per_node:
            said = f"the machine has {sheet.gpus_per_node} GPUs on a node (give --gpus-per-node to describe)"
            raise InputError(said, field="parallel.gpus_per_node", value=self.ranks_per_node)
        if parallel.num_nodes > 1 and sheet.network is None:
            said = f"{sheet.title} has no network; cost hardware NAME --template > FILE makes a sheet with one"
            raise InputError(said, field="nodes", value=parallel.num_nodes)
        self.nodes = self._nodes_of(parallel.dp)
        """Nodes that one data-parallel group spans."""

    def _peer(self) -> Line:
        """From one rank to the next on its node."""
        nvlink, host = self.sheet.nvlink, self.sheet.host_link
        if nvlink is not None:
            return Line(nvlink.hop_us.value, 1e6 / nvlink.bytes_per_s.value / nvlink.efficiency.value)
        shared = min(host.gpus_per_link.value, self.ranks_per_node)
        return Line(host.hop_us.value, 1e6 * shared / host.bytes_per_s.value / host.collective_efficiency.value)

    def _network(self, *, tcp: bool = False) -> Line:
        """From one rank to a rank on another node. ``tcp``: not with NCCL but over TCP, as published shards travel
        (``runtime/node_exchange.py``), no faster than the rank's part of the network."""
        network = self.sheet.network
        assert network is not None
        most = network.tcp_bytes_per_s.value if tcp else inf
        return Line(network.hop_us.value, max(1e6 / network.bytes_per_s.value / network.efficiency.value, 1e6 / most))

    def ring(self, ranks: int, nodes: int, cards: int = 0) -> Line:
        """All-gather (or reduce-scatter) over ``ranks`` on ``nodes``, by bytes of the whole group. ``cards``: network
        cards through which it leaves a node; by default those of all its ranks there, each in a ring of NCCL's."""
        if ranks == 1:  # a copy within the device
            device = self.sheet.device
            return Line(device.kernel_us.value, 2e6 / device.memory_bytes_per_s.value / device.memory_efficiency.value)
        us, slowest = self.sheet.collective_us.value, 0.0
        if ranks > nodes:
            peer = self._peer()
            us, slowest = us + peer.us * (ranks - nodes), peer.us_per_byte * (ranks - 1) / ranks
        if nodes > 1:
            network, cards = self._network(), cards or max(ranks // nodes, 1)
            us, slowest = us + network.us * (nodes - 1), max(slowest, network.us_per_byte * (ranks - 1) / ranks / cards)
        return Line(us, slowest)

    def _nodes_of(self, ranks: int) -> int:
        return max(nodes_spanned(self.parallel, pp_rank, ranks) for pp_rank in range(self.parallel.pp))

    def gather(self, ranks: int) -> Line:
        """All-gather, or reduce-scatter, of a group that is sharded over ``ranks`` ranks."""
        return self.ring(ranks, self._nodes_of(ranks))

    def all_to_all(self) -> Line:
        """Tokens on their way to experts, or back, by the bytes that one rank has for all expert-parallel ranks.

        Each rank sends an equal part to every rank: over the links inside the node to ranks of its node, and through
        its card to the others.
        """
        parallel, ep = self.parallel, self.parallel.ep
        nodes = max(
            len({*parallel.nodes_of(range(first, first + ep * parallel.etp, parallel.etp))})
            for first in range(0, parallel.world_size, ep * parallel.etp)
        )
        us, slowest, here = self.sheet.collective_us.value, 0.0, -(-ep // nodes)
        if here > 1:
            peer = self._peer()
            us, slowest = us + peer.us, peer.us_per_byte * (here - 1) / ep
        if nodes > 1:
            network = self._network()
            us, slowest = us + network.us, max(slowest, network.us_per_byte * (ep - here) / ep)
        return Line(us, slowest)

    def expert_tensor_gather(self) -> Line:
        """Tokens of the expert-tensor-parallel ranks gathered on each of them, or their sums sent back, by the bytes of
        all."""
        return self.ring(self.parallel.etp, -(-self.parallel.etp // self.ranks_per_node))

    def sequence_gather(self, ranks: int) -> Line:
        """Keys and values of the context-parallel ranks gathered on each of them, by the bytes of all. They go around
        one ring, which leaves a node through the card of one rank."""
        tp = self.parallel.tensor_model_parallel_size
        return self.ring(ranks, -(-tp * ranks // self.ranks_per_node), cards=1)

    def tensor_all_reduce(self) -> Line:
        """All-reduce of an activation over the tensor-parallel ranks, by its bytes."""
        tp = self.parallel.tensor_model_parallel_size
        return self._all_reduce(tp, -(-tp // self.ranks_per_node))

    def _all_reduce(self, ranks: int, nodes: int) -> Line:
        half = self.ring(ranks, nodes)
        return Line(2 * half.us - self.sheet.collective_us.value, 2 * half.us_per_byte)

    def reduce(self, ranks: int) -> Line:
        """Reduce-scatter of a group that is sharded over ``ranks`` ranks. If there are several instances, it is
        followed by the all-reduce of the shard among the ranks that hold it in each instance."""
        scatter, parallel = self.gather(ranks), self.parallel
        if parallel.instances == 1:
            return scatter
        counterparts = range(0, parallel.world_size // parallel.pp, parallel.of_instance)
        shard = self._all_reduce(parallel.instances, len({*parallel.nodes_of(counterparts)})).scaled(1 / ranks)
        return Line(scatter.us + shard.us, scatter.us_per_byte + shard.us_per_byte)

    def p2p(self) -> Line:
        """One activation message, at the slowest link between two pipeline ranks."""
        nodes = self.parallel.nodes_of(self.parallel.global_rank(rank, 0) for rank in range(self.parallel.pp))
        way = self._network() if len(set(nodes)) > 1 else self._peer()
        return Line(way.us + self.sheet.collective_us.value / 2, way.us_per_byte)

    def host_copy(self) -> Line:
        """A whole group from host memory, if all ranks of the node copy at the same time."""
        link, host = self.sheet.host_link, self.sheet.host
        shared = min(link.gpus_per_link.value, self.ranks_per_node)
        own = link.bytes_per_s.value * link.efficiency.value / shared
        return Line(link.copy_us.value, 1e6 / min(own, host.memory_bytes_per_s.value / self.ranks_per_node))

    def drive_read(self) -> Line | None:
        """A whole group from the drive to the device, if all ranks of the node read at the same time."""
        drive, copy = self.sheet.drive, self.host_copy()
        if drive is None:
            return None
        read = 1e6 * self.ranks_per_node / drive.read_bytes_per_s.value
        return Line(drive.latency_us.value + copy.us, read + copy.us_per_byte)

    def drive_write(self) -> Line | None:
        """A shard from every rank of the node to the drive at the same time, by bytes of the whole group."""
        drive = self.sheet.drive
        if drive is None:
            return None
        share = self.ranks_per_node / self.parallel.dp
        return Line(drive.latency_us.value, 1e6 * share / drive.write_bytes_per_s.value)

    def between_nodes(self) -> Line | None:
        """Exchange of published shards, by the bytes that enter a node; None if a group is on one node."""
        if self.nodes == 1:
            return None
        network = self._network(tcp=True)
        us = self.sheet.collective_us.value + network.us * (self.nodes - 1)
        return Line(us, network.us_per_byte / max(self.parallel.dp // self.nodes, 1))

    def contention(self, exchanged: float = 0.0) -> tuple[Contention, ...]:
        """Slowdowns of activities by each other: from the links that they share, or else from the sheet.

        Args:
            exchanged: share of compute in which ranks exchange activations over the host link. Next to a transfer that
                shares this link evenly, compute and the transfer take longer by this share.
        """
        sheet, given, longer = self.sheet, self.sheet.disturbance, 1 + exchanged
        during_copy, network = given.collective_beside_copy.value, sheet.network
        crosses, on_host_link = self.nodes > 1, sheet.nvlink is None and self.parallel.dp > self.nodes
        during_collective = 1.0
        if on_host_link:  # they share one link evenly
            during_copy = during_collective = 2.0
        elif crosses and network is not None and network.shares_host_link:
            # The card's bytes have priority. A copy gets the rest of the link, at least half of it.
            during_collective = 1 / max(1 - self.host_copy().us_per_byte / self._network().us_per_byte, 0.5)
        # The part of a shared link that publishing takes while it is alone. Beside a collective it gets at most half.
        part = self._network().us_per_byte / self._network(tcp=True).us_per_byte if crosses else 0.0
        part = 1.0 if on_host_link else part
        publishing = max(given.collective_beside_copy.value, 1 / max(1 - part, 0.5))
        rows = [(*pair, given.copy_beside_publish.value) for pair in (("cpu", "publish"), ("publish", "cpu"))]
        for collective in ("gpu", "reduce"):
            rows += [
                (collective, "cpu", during_copy),
                ("cpu", collective, during_collective),
                (collective, "publish", publishing),
                ("publish", collective, 2 * part),
                ("compute", collective, given.compute_beside_collective.value * (longer if on_host_link else 1.0)),
            ]
        rows += [("compute", copy, given.compute_beside_copy.value * longer) for copy in ("cpu", "publish")]
        rows.append(("compute", "nvme", given.compute_beside_copy.value))
        shared = ("cpu", "publish", *(("gpu", "reduce") if on_host_link else ()))
        rows += [(transfer, "compute", longer) for transfer in shared if exchanged]
        return tuple(Contention(measured=a, busy=b, slowdown=max(by, 1.0)) for a, b, by in rows if by < inf)
