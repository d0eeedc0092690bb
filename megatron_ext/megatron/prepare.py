"""From a schedule that fits the run to an executor: groups, routes and the compiled program."""

from time import perf_counter_ns

import torch.distributed as dist
from megatron.core import parallel_state

from megatron_ext.megatron.cpu_compat import has_cuda
from megatron_ext.megatron.describe import describe_chunk
from megatron_ext.megatron.layers import Boundaries, bare
from megatron_ext.megatron.recompute import blocks_of
from megatron_ext.megatron.shards import hold_shards, offloaded_shards, refuse_state_of_freed
from megatron_ext.runtime import debug
from megatron_ext.runtime.device import device_of
from megatron_ext.runtime.executor import Executor
from megatron_ext.runtime.faults import Faults
from megatron_ext.runtime.group import Clock, FreedGroup, Group, Residency
from megatron_ext.runtime.heap import keep_freed_blocks
from megatron_ext.runtime.hierarchical import HierarchicalGather, HierarchicalRoute
from megatron_ext.runtime.host_pool import HostPool
from megatron_ext.runtime.node_exchange import make_process_groups
from megatron_ext.runtime.node_groups import make_node_groups
from megatron_ext.runtime.nvme_pool import NvmePool, ReadSettings
from megatron_ext.runtime.program import compile_program
from megatron_ext.runtime.publisher import Publisher, Target
from megatron_ext.runtime.recorder import Recorder
from megatron_ext.runtime.routes import CpuRoute, GpuRoute, NvmeRoute
from megatron_ext.schedule.footprint import device_peaks, slot_bytes
from megatron_ext.schedule.model import Schedule
from megatron_ext.workload.route import HIERARCHICAL


def prepare(schedule: Schedule, ddps: list, bucket_groups: dict[int, object], optimizers: list, faults: Faults, recorder: Recorder | None, nvme_path=None) -> Executor:
    """Make everything that training by ``schedule`` needs on this rank; collective.

    Args:
        schedule: a schedule that matches the run.
        ddps: this rank's model chunks, laid out by :func:`buckets.lay_out`.
        bucket_groups: their bucket groups by group index.
        optimizers: Megatron's DistributedOptimizer objects.
        faults: delays and negative controls.
        recorder: where to record what ran when, or None.
        nvme_path: directory for NVMe copies; used by schedules with the nvme route.

    Raises:
        InputError: copies cannot be made; not on every rank of the run.
    """
    pp_rank = parallel_state.get_pipeline_model_parallel_rank()
    process_group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    clock, residency = Clock(), Residency()
    groups = make_groups(schedule, bucket_groups, process_group, residency)
    buckets = [(bucket_groups[index].buckets[0], group) for index, group in groups.items()]
    if schedule.zero_stage == 3 or not has_cuda():
        keep_freed_blocks()
    if schedule.zero_stage == 3:
        hold_shards(optimizers, buckets)
        for chunk_id, ddp in enumerate(ddps):
            refuse_state_of_freed(bare(ddp), [group for index, group in groups.items() if schedule.groups[index].model_chunk_id == chunk_id])

    gpu = GpuRoute(process_group)
    routes = {"gpu": gpu if recorder is None else _RecordedGather(gpu, recorder)}
    hierarchical = _hierarchical(schedule, groups, process_group, recorder)
    if hierarchical is not None:
        routes[HIERARCHICAL] = hierarchical
    checks = None
    if debug.wanted():
        order = debug.IssueOrder()
        routes = {name: debug.OrderedRoute(route, order) for name, route in routes.items()}
        gpu = debug.OrderedRoute(gpu, order)
        checks = debug.Checks(device_peaks(schedule)[pp_rank], order, exchange_over(process_group))
    copies = _Copies(schedule, groups, offloaded_shards(optimizers, buckets), process_group, clock, faults, recorder, nvme_path) if schedule.publish else None
    if copies is not None:
        routes.update(copies.routes)
    blocks = [blocks_of(describe_chunk(ddp, pp_rank, index), ddp.config) for index, ddp in enumerate(ddps)]
    boundaries = Boundaries(ddps, uses_of_groups(schedule, ddps, pp_rank), blocks)
    program = compile_program(schedule, schedule.ranks[pp_rank], groups, routes, clock, boundaries, recorder, faults.skip_group, checks is not None)
    executor = Executor(
        program, groups, clock, residency, gpu.issue, recorder=recorder, checks=checks,
        publisher=copies and copies.publisher, pool=copies and copies.pool, drop_staged=copies and copies.drop_staged,
    )  # fmt: skip
    executor.on_close(boundaries.close)
    for close in copies.closing if copies is not None else ():
        executor.on_close(close)
    if hierarchical is not None:
        executor.on_close(hierarchical.close)
    return executor


def _hierarchical(schedule: Schedule, groups: dict[int, Group], process_group, recorder) -> HierarchicalRoute | None:
    """The route of this rank's groups that are gathered in two legs; None where it has none.

    Process groups are made by all ranks together as soon as any rank has such a group.
    """
    wanted = {index for index, group in enumerate(schedule.groups) if group.algorithm == HIERARCHICAL}
    if not wanted:
        return None
    node_groups = make_node_groups(schedule.parallel, dist.get_backend(process_group))
    own = [group for index, group in groups.items() if index in wanted]
    return HierarchicalRoute(HierarchicalGather(node_groups, device_of(own[0].whole)), recorder) if own else None


class _Copies:
    """Host and NVMe copies of a rank's published groups: what writes them and what reads them.

    Made on every rank as soon as any rank publishes: process groups are made by all together.
    """

    def __init__(self, schedule: Schedule, groups, offloaded, process_group, clock: Clock, faults: Faults, recorder, nvme_path):
        self.routes, self.publisher, self.pool, self.drop_staged, self.closing = {}, None, None, None, []
        local, nodes = make_process_groups(schedule.parallel)
        targets = [
            Target(groups[entry.group], "cpu" in entry.to, "nvme" in entry.to, offloaded.get(entry.group))
            for entry in schedule.publish if entry.group in groups
        ]  # fmt: skip
        if not targets:
            return
        local = local or process_group
        rank, size = dist.get_rank(local), dist.get_world_size(local)
        exchange = exchange_over(local)
        device = device_of(targets[0].group.whole)
        hosted = {target.group.index for target in targets if target.host}
        pool = self.pool = HostPool([target.group for target in targets], hosted, rank, size, exchange)
        self.closing.append(pool.close)
        nvme, staged = None, [target.group for target in targets if target.nvme]
        # The drive first: it is shared out by messages among the ranks, which all must reach. Pinning may fail on one alone.
        if staged:
            settings = ReadSettings.of(schedule.metadata.options.get("nvme", {}))
            pp_rank = parallel_state.get_pipeline_model_parallel_rank()
            slots, slot_size = schedule.limits.nvme_slots, slot_bytes(schedule, pp_rank)
            nvme = NvmePool(nvme_path, staged, rank, exchange, slots=slots, slot_bytes=slot_size, settings=settings, device=device)
        if hosted:
            self.routes["cpu"] = CpuRoute(pool, device, clock, faults, recorder)
            self.closing.append(self.routes["cpu"].close)
        if nvme is not None:
            route = self.routes["nvme"] = NvmeRoute(nvme, pool, device, clock, faults, slots, recorder)
            self.drop_staged = route.drop
            self.closing += [nvme.close, route.close]
        self.publisher = Publisher(targets, pool, nvme, nodes, dist.get_rank(process_group), device, clock, faults, recorder)
        self.closing.append(self.publisher.close)


def make_groups(schedule: Schedule, bucket_groups: dict[int, object], process_group, residency: Residency) -> dict[int, Group]:
    """This rank's groups by index, over the storage of their buckets."""
    dp_rank, dp_size = dist.get_rank(process_group), dist.get_world_size(process_group)
    groups = {}
    for index, bucket_group in sorted(bucket_groups.items()):
        (bucket,) = bucket_group.buckets
        name = f"chunk {schedule.groups[index].model_chunk_id}"
        if schedule.zero_stage == 3:
            groups[index] = FreedGroup(index, name, bucket.param_data, dp_rank, dp_size, residency)
        else:
            groups[index] = Group(index, name, bucket.param_data, dp_rank, dp_size)
            residency.add(groups[index].bytes)
        assert groups[index].bytes == schedule.groups[index].bytes
    return groups


def uses_of_groups(schedule: Schedule, ddps: list, pp_rank: int) -> dict[int, tuple[int, int]]:
    """First and last layer of its chunk that use each of this rank's groups."""
    found = {}
    for chunk_id, ddp in enumerate(ddps):
        uses = {p.name: p.uses for p in describe_chunk(ddp, pp_rank, chunk_id).parameters}
        for index, group in enumerate(schedule.groups):
            if (group.pp_rank, group.model_chunk_id) == (pp_rank, chunk_id):
                layers = [layer for name in group.parameters for layer in uses[name]]
                found[index] = (min(layers), max(layers))
    return found


def exchange_over(process_group):
    """``exchange(object) -> list``: all-gather of small objects over ``process_group``."""

    def exchange(value):
        values = [None] * dist.get_world_size(process_group)
        dist.all_gather_object(values, value, group=process_group)
        return values

    return exchange


class _RecordedGather:
    """The gpu route with its link's busy time recorded."""

    def __init__(self, route, recorder: Recorder):
        self.route, self.recorder = route, recorder

    def issue(self, group):
        start = perf_counter_ns()
        work = self.route.issue(group)
        name = f"unshard {group.index}"
        if group.whole.device.type == "cpu":  # on CUDA a work's future completes when it is queued
            work.get_future().add_done_callback(lambda _: self.recorder.add("gpu", name, start, perf_counter_ns()))
        return work
