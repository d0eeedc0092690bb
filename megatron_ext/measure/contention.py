"""Measures each link alone, and while each other link or compute is busy, in both directions.

The measured operation runs on the calling thread. The busy one runs on its own thread and on its own
process groups, on every rank at once, for as long as the measuring takes.

[Note: One hardware queue]
Two threads issue the collectives of two communicators in an order that differs by rank. NCCL tolerates that as long as
either can start while the other waits. With CUDA_DEVICE_MAX_CONNECTIONS=1 all streams share one hardware queue. On one
rank a second all-gather behind the first one on its stream blocks the queue for the other communicator. On another rank
the roles are swapped, and both wait for ever. Such pairs are then not measured. A run is safe: see [Note: One order
over all communicators] in routes/__init__.py.

[Note: Copies without a gap]
On a GPU the host's step is not measured while publishing is busy, nor publishing during the host's step. Both copy from
the device. On an H200 the step's gradients had not arrived after 8 s, while copies of the busy thread followed each
other without a gap. In training both ended in every run. The planner treats an unmeasured pair as an interval.
"""

import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable
from itertools import permutations
from statistics import median
from time import monotonic

import torch

from megatron_ext.measure.fabric import Fabric
from megatron_ext.measure.nvme_route import NvmeStage
from megatron_ext.measure.operation import Operation
from megatron_ext.measure.operations import OPERATIONS, Internode, MatrixProduct, PublishAcross, Reduce
from megatron_ext.measure.options import MIB, Options
from megatron_ext.measure.sampling import sample
from megatron_ext.measure.timed_steps import TimedHostStep
from megatron_ext.measure.visits import sets_of_ranks, until_last
from megatron_ext.runtime.objects import gather_objects

LINKS = ("compute", "gpu", "cpu", "reduce", "publish", "p2p", "nvme", "host_step")
"""The links, in the order in which they are the busy one. If time runs out, the last ones are missing: links that are
busy once an iteration, and not reduces, which run during every backward if gradients come and go."""

COLLECTIVES = ("gpu", "p2p", "reduce")
"""Links whose transfers are collectives of a communicator."""

BUSY_DURING_HOST_STEP = {"compute", "publish", "reduce"}
"""Links that are busy while the host steps a group at the end of a backward."""

KINDS = OPERATIONS | {NvmeStage.name: NvmeStage, TimedHostStep.name: TimedHostStep}
"""The operation that is timed for each link; see :func:`kinds`."""

SIZES = {"cpu": (2 * MIB, MIB // 4), "cuda": (64 * MIB, 16 * MIB)}
"""By kind of device, the size of measured and busy transfers except messages. The first size is well into the range
where bytes determine the time (on a device 2 MiB are copied before Python has issued the next). If a link is so slow
that not every pair would be measured, a smaller size is used, down to the second."""

IN_FLIGHT = 2
"""Rounds that a busy thread keeps in flight on a CUDA device."""

NEVER = 1 << 62


def pairs(fabric: Fabric) -> list[tuple[str, str]]:
    """(measured, busy) of every ordered pair of two links that this run has and that can be measured."""
    options = fabric.options
    present = [name for name in LINKS if name in options.links and options.has(name)]
    if options.nodes > 1 and {"cpu", "publish"} <= set(present):
        # Publishing first: it shares the network with all-gathers. If time runs out, copies are missing instead.
        present.remove("publish")
        present.insert(present.index("cpu"), "publish")
    left_out = {*unsafe_pairs(fabric.torch_device.type)}
    near = BUSY_DURING_HOST_STEP - ({"publish"} if fabric.torch_device.type == "cuda" else set())
    left_out |= {pair for pair in permutations(present, 2) if "host_step" in pair and not near.intersection(pair)}
    together = [(measured, busy) for busy in present for measured in present if measured != busy]
    return [pair for pair in together if pair not in left_out]


def unsafe_pairs(device_type: str) -> list[tuple[str, str]]:
    """(measured, busy) that could wait for each other for ever, see [Note: One hardware queue]."""
    if device_type != "cuda" or os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") != "1":
        return []
    return list(permutations(COLLECTIVES, 2))


def kinds(fabric: Fabric) -> dict[str, type[Operation]]:
    """The operation that is timed for each link. Publishing to several nodes uses the network, so it disturbs every
    other link that does. Here it is timed with both of its legs, though each leg has its own curve."""
    return dict[str, type[Operation]](KINDS) | ({PublishAcross.name: PublishAcross} if fabric.options.nodes > 1 else {})


def size_of(fabric: Fabric, name: str, most: int) -> int:
    """Bytes of a transfer, at most ``most``. A message between pipeline ranks has only its own size (float32), because
    the time that it waits for a processor does not grow with the size."""
    options = fabric.options
    message = options.seq_length * options.micro_batch_size * options.hidden_size * 4
    return options.rounded(min(message if name == "p2p" else most, options.largest))


def fitting(us: dict[str, float], wanted: list[tuple[str, str]], seconds: float, largest: int, least: int) -> int:
    """The size at which ``wanted`` can be measured in ``seconds``. A pair needs three rounds that may take twice as
    long as alone, and four that keep the other link busy. ``us``: a round of each link alone at ``largest`` bytes."""
    size = largest
    most_us = sum(6 * us[measured] + 4 * us[busy] for measured, busy in wanted)
    while size > least and most_us * size / largest > seconds * 1e6:
        size //= 2
    return size


def run(
    fabric: Fabric,
    wanted: list[tuple[str, str]],
    seconds: float,
    report: Callable,
    so_far: Callable[[list[dict]], None] = lambda rows: None,
) -> list[dict]:
    """Rows ``{measured, busy, size_bytes, p50_us, slowdown}`` for ``wanted``.

    Args:
        so_far: called on every rank with the rows of the busy links that are done.
    """
    if not wanted or fabric.agree(int(seconds <= 0)):
        return []
    operations, (largest, least) = kinds(fabric), SIZES[fabric.torch_device.type]
    measured = {name: operations[name](fabric) for name in sorted({pair[0] for pair in wanted})}
    deadline = monotonic() + seconds
    while_busy: dict[tuple[str, str], list[float]] = {}

    def slot(still: int) -> float:
        return max(deadline - monotonic(), 0.0) / max(still, 1)

    visits = len(wanted) + 3 * len(measured)

    def each_alone(most: int) -> dict[str, list[float]]:
        nonlocal visits
        taken = {}
        for name, operation in measured.items():
            taken[name] = sample(fabric, operation, size_of(fabric, name, most), slot(visits), warmups=1).us
            visits -= 1
        return taken

    first = each_alone(largest)
    took = {name: median(us) * measured[name].messages for name, us in first.items()}
    most = fabric.agree(fitting(took, wanted, max(deadline - monotonic(), 0.0), largest, least))
    # Time links alone before and after the pairs, so that a machine that drifts does not look like contention.
    if most == largest:
        before, visits = first, visits - len(measured)
    else:
        before = each_alone(most)
    sizes = {name: size_of(fabric, name, most) for name in measured}
    for busy_name in dict.fromkeys(pair[1] for pair in wanted):
        busy = Busy(fabric, operations[busy_name](fabric, busy=True), size_of(fabric, busy_name, most))
        for pair in wanted:
            if pair[1] == busy_name:
                if fabric.agree(int(monotonic() > deadline)):
                    break  # out of time: the table names the pairs without a row
                if fabric.rank == 0:
                    report(pair)
                busy.start()
                while_busy[pair] = sample(fabric, measured[pair[0]], sizes[pair[0]], slot(visits), warmups=1).us
                busy.stop()
                visits -= 1
        busy.operation.close()
        so_far(_rows(sizes, fabric, before, while_busy))
    after = each_alone(most)
    alone = {name: before[name] + after[name] for name in measured}
    for operation in measured.values():
        operation.close()
    return _rows(sizes, fabric, alone, while_busy)


def _rows(sizes: dict[str, int], fabric: Fabric, alone: dict, while_busy: dict) -> list[dict]:
    """The table's rows of the pairs that were measured, from this rank's times ``alone`` and ``while_busy``, by pair.
    Collective."""
    rows, everyone = [], gather_objects((alone, while_busy))
    for measured, busy in while_busy:
        us, by = slowed((measured, busy), fabric.options, everyone)
        size = sizes[measured]
        rows.append({"measured": measured, "busy": busy, "size_bytes": size, "p50_us": us, "slowdown": by})
    return rows


def slowed(pair: tuple[str, str], options: Options, everyone: list[tuple[dict, dict]]) -> tuple[float, float]:
    """(microseconds of the measured link while the other is busy, this time divided by its time alone).

    Args:
        everyone: for every rank, microseconds in every round: alone by name, and while another is busy by pair.
    """
    together = sets_of_ranks(pair[0], options)
    alone, contended = (
        median(us for round_us in until_last(together, times) for us in round_us)
        for times in ([one[pair[0]] for one, _ in everyone], [one[pair] for _, one in everyone])
    )
    return contended, contended / alone


def leader_of(fabric: Fabric, operation: Operation) -> int:
    """The rank that leads the ranks, this one among them, that must repeat ``operation`` equally often: this rank
    itself if the operation waits for no other."""
    options, rank, tp = fabric.options, fabric.rank, fabric.options.tensor_model_parallel_size
    if isinstance(operation, Internode):  # the counterparts wait for each other
        return rank + (min(operation.exchange.dp_ranks) - fabric.dp_rank) * tp
    if isinstance(operation, MatrixProduct) or operation.name in ("cpu", "publish", "nvme", "host_step"):
        return rank
    if operation.name == "p2p":
        peer = options.peers[rank]
        return rank if peer is None or fabric.pp_rank % 2 == 0 else peer
    if isinstance(operation, Reduce):  # instances wait for each other as well
        own = rank % options.ranks_of_stage
        return rank - own + own % tp
    return rank - fabric.dp_rank * tp


class Busy:
    """Repeats an operation on a thread until told to stop, on all ranks equally often.

    Every rank must call a collective equally often, so the first rank of each data-parallel
    (or pipeline) group decides when to stop: before a round it may post that the group ends ``slack`` rounds later.
    No other rank can be further than ``slack`` rounds ahead of the leader, since a round ends only with the leader's
    part in it. On CUDA a rank continues while :data:`IN_FLIGHT` rounds are on the device, and a rank that has just read
    the word issues one more.
    """

    def __init__(self, fabric: Fabric, operation: Operation, size_bytes: int):
        self.fabric, self.operation, self.size_bytes = fabric, operation, size_bytes
        leader = leader_of(fabric, operation)
        self.word, self.leads = 1 + leader, leader == fabric.rank  # word 0 is what all ranks agree by
        self.slack = 2 if fabric.torch_device.type == "cpu" else IN_FLIGHT + 2

    def start(self) -> None:
        """Keep the link busy from a thread of this rank. Returns when it is busy on all ranks. Collective."""
        self._stop = threading.Event()
        self._running = threading.Event()
        self._error: BaseException | None = None
        if self.leads:
            self.fabric.board.post(self.word, NEVER)
        self.fabric.barrier()
        self._thread = threading.Thread(target=self._loop, daemon=True)
        self._thread.start()
        self._running.wait()
        self.fabric.barrier()

    def stop(self) -> None:
        """End the thread. Raises the exception that the thread has raised, if any. Collective."""
        self.fabric.barrier()
        self._stop.set()
        self._thread.join()
        if self._error is not None:
            raise self._error
        self.fabric.barrier()

    def _loop(self) -> None:
        try:
            with self._own_stream():
                self._rounds()
        except BaseException as error:  # raised again by stop(), on the calling thread
            self._error = error
            self._running.set()

    def _rounds(self) -> None:
        round_index, end = 0, NEVER
        in_flight: deque = deque()
        while True:
            if self.leads and end == NEVER and self._stop.is_set():
                end = round_index + self.slack
                self.fabric.board.post(self.word, end)
            elif not self.leads:
                end = self.fabric.board.read(self.word)
            if round_index >= end:
                break
            self.operation.issue(self.size_bytes, round_index).wait()
            if self.fabric.torch_device.type == "cuda":
                in_flight.append(torch.cuda.current_stream().record_event())
                if len(in_flight) > IN_FLIGHT:  # busy without a gap, but never far ahead of the device
                    in_flight.popleft().synchronize()
            round_index += 1
            self._running.set()
        for event in in_flight:
            event.synchronize()

    def _own_stream(self):
        """On CUDA, a separate stream: otherwise the busy work would be in the queue of the measured operation.
        (The current device is per thread, so it is set here.)"""
        if self.fabric.torch_device.type != "cuda":
            return contextlib.nullcontext()
        torch.cuda.set_device(self.fabric.torch_device)
        return torch.cuda.stream(torch.cuda.Stream(self.fabric.torch_device))
