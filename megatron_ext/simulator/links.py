"""The links of one simulated rank: queues in issue order, and what starts when an activity ends."""

from megatron_ext.cost.cost_table import KINDS
from megatron_ext.simulator.activity_kinds import CPU, GPU, HOST_ADD, HOST_STEP, NVME, PUBLISH, REDUCE
from megatron_ext.simulator.engine_protocols import EngineView
from megatron_ext.simulator.rank_programs import REDUCE_VISIT, SHARD, Gather
from megatron_ext.simulator.rank_state import Activity, RankState


def issue_gather(engine: EngineView, rank: RankState, gather: Gather) -> None:
    """Put an unshard into the queue of its first link. For a staged group and for a shard in host memory that is the
    link of host copies: the former leaves its slot over it, the latter crosses it before the all-gather."""
    gather.issued_us = engine.now
    link = GPU if gather.route == GPU else CPU
    rank.queues[link].append(gather)
    if gather.flat:
        rank.communicator_of(gather.group).append(GPU)
    serve(engine, rank, link)


def issue_reduce(engine: EngineView, rank: RankState, operation: tuple) -> None:
    """Put the reduction of a group's gradients into its queue."""
    rank.reducing += 1
    rank.queues[REDUCE].append(operation)
    rank.communicator_of(operation[1]).append(REDUCE)
    serve(engine, rank, REDUCE)


def serve(engine: EngineView, rank: RankState, kind: int) -> None:
    """Start the head of a link's queue if the link is idle and nothing holds the head back.

    A ``cpu`` gather waits until its group is published, a ``nvme`` gather until its group is staged in, and a stage-in
    until its slot is empty and its group is published. A collective over a data-parallel communicator waits until
    everything that was issued to the communicator before has ended.
    """
    if rank.active[kind] is not None or not rank.queues[kind]:
        return
    head = rank.queues[kind][0]
    if kind in (GPU, CPU):
        if head.flat and rank.communicator_of(head.group)[0] != GPU:
            return
        if head.route == SHARD:
            size, us = _leg(head, kind)
        elif kind == CPU and head.group not in (rank.published if head.route == CPU else rank.staged):
            return
        else:
            size, us = head.bytes, head.us
        if head.start_us < 0:
            head.start_us = engine.now
    elif kind == NVME:
        _, group, slot, size, us = head
        if slot in rank.slot_busy or group not in rank.published:
            return
        rank.slot_busy.add(slot)
    elif kind == REDUCE:
        _, group, size, us, *_ = head
        if rank.communicator_of(group)[0] != REDUCE:
            return
    else:
        _, size, us, *_ = head
    rank.queues[kind].popleft()
    if kind == HOST_STEP and not engine.delayed and not _has_room(engine, rank, head[0]):
        serve(engine, rank, kind)
        return
    memory = engine.host_memory.rate(kind, head, size, us) if engine.host_memory is not None else 0.0
    slack = max(us / (head[3] or 1.0), 1.0) if kind == HOST_STEP else 1.0
    rank.active[kind] = Activity(rank, kind, size, us, engine.now, head, memory, slack)


def _leg(gather: Gather, kind: int) -> tuple[int, float]:
    """Bytes and microseconds of the next leg of ``cpu_shard`` over link ``kind``. Each link has two legs: one piece,
    and all other pieces."""
    size, us = (gather.shard_bytes, gather.shard_us) if kind == CPU else (gather.bytes, gather.us)
    if gather.pieces == 1:
        return size, us
    single = gather.copied == 0 if kind == CPU else gather.gathered == 1
    share = (1 if single else gather.pieces - 1) / gather.pieces
    return size, us * share


def _shard_leg_ended(engine: EngineView, rank: RankState, kind: int, gather: Gather) -> None:
    """Start the next leg of ``cpu_shard``. Pieces that are copied are gathered while the others are copied; the last
    piece is gathered after the last copy."""
    legs = 1 if gather.pieces == 1 else 2
    if kind == CPU:
        gather.copied += 1
        if gather.copied < legs:
            rank.queues[CPU].appendleft(gather)
        if gather.copied == 1:
            rank.queues[GPU].append(gather)
        elif gather.gathered == 1:
            rank.queues[GPU].appendleft(gather)
    else:
        gather.gathered += 1
        if gather.gathered == legs:
            engine.gather_ended(rank, gather)
        elif gather.copied == legs:
            rank.queues[GPU].appendleft(gather)
    serve(engine, rank, GPU)
    serve(engine, rank, CPU)


def _added_up(engine: EngineView, rank: RankState, group: int, *, freed: bool = False) -> None:
    """A gradient is reduced and added up in the place where it rests. After its last reduce the host steps the group,
    if there is room for copies of its states. ``freed``: the whole gradient is freed now."""
    rank.reducing -= 1
    if freed:
        engine.gradient_freed(rank)
    unit = None if engine.early is None else engine.early.units.get(group)
    if unit is not None:
        rank.visits[group] = rank.visits.get(group, 0) + 1
        if rank.visits[group] == unit.visits:
            step_us = unit.spared_us if unit.spared_drive_us else unit.us
            rank.queues[HOST_STEP].append((group, unit.bytes, unit.us, step_us, unit.spared_drive_us))
            serve(engine, rank, HOST_STEP)
    engine.start_optimizer(rank)


def delay_step(engine: EngineView, rank: RankState) -> None:
    """Start the host's step of a delayed update, once the parameters from before it are published."""
    if engine.delayed and len(rank.published) == len(engine.publish[rank.pp_rank]):
        step = engine.delayed[rank.pp_rank]
        rank.queues[HOST_STEP].append((-1, step.bytes, step.us, step.step_us, step.drive_us))
        serve(engine, rank, HOST_STEP)


def _has_room(engine: EngineView, rank: RankState, group: int) -> bool:
    """Take memory for the copy of a group's states. Returns whether there was enough."""
    assert engine.early is not None
    unit = engine.early.units[group]
    if rank.early_bytes + unit.saved_bytes > engine.early.rollback_bytes:
        return False
    rank.early_bytes += unit.saved_bytes
    rank.early_us += unit.spared_us
    rank.early_drive_us += unit.spared_drive_us
    return True


def _name_of(kind: int, item) -> str:
    """The name of a transport in a trace."""
    if kind in (GPU, CPU):
        return str(item.group)
    if kind in (NVME, REDUCE):
        return str(item[1])
    return f"gradient {item[0]}" if kind == PUBLISH and len(item) == 4 else str(item[0])


def transport_ended(engine: EngineView, rank: RankState, kind: int, activity: Activity, lasted: float) -> None:
    """Start the activities that have waited for this transport."""
    item = activity.item
    if kind == HOST_STEP:
        *_, us, step_us, drive_us = item
        step_us, name = lasted / us * step_us if us else 0.0, "delayed" if engine.delayed else str(item[0])
        rank.busy[HOST_STEP] += step_us - lasted
        engine.host_stepped(rank, name, activity.started, step_us, drive_us)
    elif engine.events is not None:  # only a trace needs names, and most simulations keep none
        begin = item.issued_us if kind == GPU and item.flat else activity.started  # as a run records it
        engine.record(rank, KINDS[kind], _name_of(kind, item), begin, engine.now - begin)
    if kind in (GPU, CPU):
        if item.flat:
            rank.communicator_of(item.group).popleft()
            serve(engine, rank, REDUCE)
        if item.route == SHARD:
            _shard_leg_ended(engine, rank, kind, item)
            return
        if item.route == NVME:
            rank.staged.discard(item.group)
            rank.slot_busy.discard(item.slot)
            serve(engine, rank, NVME)
        engine.gather_ended(rank, item)
    elif kind == NVME:
        rank.staged.add(item[1])
        serve(engine, rank, CPU)
    elif kind == PUBLISH and len(item) == 4:
        engine.gradient_freed(rank)
        rank.queues[HOST_ADD].append((item[0], item[1], item[3]))
        serve(engine, rank, HOST_ADD)
    elif kind == PUBLISH:
        rank.published.add(item[0])
        delay_step(engine, rank)
        serve(engine, rank, CPU)
        serve(engine, rank, NVME)
    elif kind == REDUCE and item[0] == REDUCE_VISIT and item[4] is not None:
        rank.communicator_of(item[1]).popleft()
        serve(engine, rank, GPU)
        rank.queues[PUBLISH].append((item[1], *item[4]))
        serve(engine, rank, PUBLISH)
    elif kind == REDUCE:
        rank.communicator_of(item[1]).popleft()
        serve(engine, rank, GPU)
        _added_up(engine, rank, item[1], freed=item[0] == REDUCE_VISIT)
    elif kind == HOST_ADD:  # one gradient is added at a time; the optimizer waits for the last one
        _added_up(engine, rank, item[0])
    elif kind == HOST_STEP:
        rank.stepped = bool(engine.delayed)
        if rank.norm_at >= 0:
            engine.step_optimizer(rank, engine.now)
    serve(engine, rank, kind)
