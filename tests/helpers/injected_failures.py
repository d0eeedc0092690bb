"""Raises an exception at every call site of the background threads, one run of two ranks each.

``python injected_failures.py FOLDER [EVERY]`` prints a JSON list of what became of the runs. A first run records, by a
tracing hook, which lines of the package with a call each background thread executes and how often; every other one
raises :class:`Injected` at one of them on rank 0, or at every EVERY-th of a thread. In the last run, of no call site,
rank 1 stops in an iteration. Ranks are forked from one process that has imported everything.
"""

import ast
import functools
import json
import os
import sys
import threading
import time
import traceback
from collections import Counter
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import faults
import torch
import torch.distributed as dist

import megatron_ext
from megatron_ext.cpubench import ordered_collectives
from megatron_ext.runtime.device import HostDevice
from megatron_ext.runtime.executor import Executor
from megatron_ext.runtime.group import Clock, RankGroup, WholeBytes
from megatron_ext.runtime.host_pool import HostPool, Sharers
from megatron_ext.runtime.host_step.after_norm import AfterNorm
from megatron_ext.runtime.host_step.drive_states import DriveStates, DriveUnit
from megatron_ext.runtime.host_step.flat_adamw import FlatAdamW
from megatron_ext.runtime.host_step.room import StepStreams
from megatron_ext.runtime.host_step.unit import Piece
from megatron_ext.runtime.issuer import Issuer
from megatron_ext.runtime.node_copies import NodeCopies
from megatron_ext.runtime.node_exchange import NodeExchange
from megatron_ext.runtime.node_groups import make_node_groups
from megatron_ext.runtime.nvme_pool import NvmePool
from megatron_ext.runtime.program import Program
from megatron_ext.runtime.publisher import Publisher, Target, by_thread
from megatron_ext.runtime.recorder import Recorder
from megatron_ext.runtime.routes.drive_copy import DriveCopy
from megatron_ext.runtime.routes.hierarchical_gather import HierarchicalGather
from megatron_ext.runtime.routes.host_copy import HostCopy
from megatron_ext.runtime.routes.shard_gather import ShardGather
from megatron_ext.runtime.watch import Watch, exit_code
from megatron_ext.workload.drive_reads import DriveReads
from megatron_ext.workload.parallel import Parallel

PACKAGE = str(Path(megatron_ext.__file__).parent)
ITERATIONS = 2
AT_ONCE = 10
TRIES = 6
HANGS_AFTER = 40.0
SETUPS = {"one node": 2, "two nodes": 1}
"""Ranks a node. What the first covers is not done again."""


class Injected(Exception):
    """Raised where a call would have been made."""


@functools.cache
def lines_with_calls(file: str) -> frozenset[int]:
    return frozenset(node.lineno for node in ast.walk(ast.parse(Path(file).read_text())) if isinstance(node, ast.Call))


class Tracer:
    """Counts lines with calls by thread, and raises at the ``hit``-th execution of ``site``."""

    def __init__(self, site: tuple | None, hit: int, told: Path):
        self.site, self.hit, self.told, self.counts = site, hit, told, Counter()

    def __call__(self, frame, event: str, argument):
        file = frame.f_code.co_filename
        return self.line if file.startswith(PACKAGE) else None

    def line(self, frame, event: str, argument):
        file, line = frame.f_code.co_filename, frame.f_lineno
        if event == "line" and line in lines_with_calls(file):
            site = (threading.current_thread().name.rpartition("_")[0] or "main", file, line)
            if not site[0].startswith("megatron_ext-drive"):
                site = (threading.current_thread().name, file, line)
            self.counts[site] += 1
            if site == self.site and self.counts[site] == self.hit:
                self.told.write_text(str(time.monotonic()))
                raise Injected(f"at {file}:{line}")
        return self.line


class Trained(NamedTuple):
    """What trains on a rank, and all that runs beside it."""

    executor: Executor
    groups: list[RankGroup]
    link: StepStreams
    issuer: Issuer
    watch: Watch
    sums: dist.ProcessGroup


def build(rank: int, folder: Path, setup: str, stalls: bool) -> Trained:
    """A rank whose three groups go by three routes."""
    per_node = SETUPS[setup]
    ordered_collectives.install()
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    sizes = dict(pipeline_model_parallel_size=1, data_parallel_size=2, num_microbatches=1)
    parallel = Parallel(**sizes, order="no_pipeline", gpus_per_node=per_node)
    clock, device, recorder = Clock(), HostDevice(), Recorder(rank)
    groups = [RankGroup(index, "chunk 0", torch.full((1 << 13,), float(index)), rank, 2) for index in range(3)]
    # All groups first: who makes one with a rank that is gone waits for the launcher, which here is none.
    of_nodes = make_node_groups(parallel)
    local, nodes = (None, None) if of_nodes is None else (of_nodes.local, NodeExchange(of_nodes))
    sums, gathers, legs = dist.new_group([0, 1]), dist.new_group([0, 1]), make_node_groups(parallel)
    watch = Watch(rank, 1.0 if stalls else 0.0)

    def exchange(value) -> list:
        found = [None] * dist.get_world_size(local)
        dist.all_gather_object(found, value, group=local)
        return found

    targets, issuer = [Target(groups[n], True, n == 1, nodes=nodes) for n in range(2)], Issuer()
    written = by_thread(targets)
    sharers = Sharers(groups[:2], dist.get_rank(local), per_node, exchange)
    pool = HostPool([sharers], {0, 1}, written, device)
    slots = dict(slots=1, slot_bytes=groups[1].bytes, settings=DriveReads(block_bytes=4096, queue_depth=3))
    nvme = NvmePool(folder, [sharers._replace(groups=groups[1:2])], **slots, device=device)
    copies = NodeCopies(pool, nvme, device, issuer, clock, recorder)
    cpu, read = HostCopy(copies), DriveCopy(copies)
    if legs is None:
        collective = ShardGather(gathers, device, recorder)
    else:
        collective = HierarchicalGather(legs, device, recorder)
    publisher = Publisher(targets, copies)
    unshards = [partial(group.unshard, route.issue, clock) for group, route in zip(groups, (cpu, read, collective))]
    waits = [partial(group.wait, clock) for group in groups]
    start = (partial(read.stage_in, groups[1], 0), *unshards)
    program = Program(start, ((0, tuple(waits)),), ((0, (), ()),))
    how = dict(pool=pool, recorder=recorder, drop_staged=read.drop)
    own = {group.index: group for group in groups}
    executor = Executor(program, own, clock, WholeBytes(), None, issuer, [publisher], **how)
    for part in (pool, nvme, cpu, read, collective):
        executor.on_close(part.close)
    watch.executor = executor
    link = StepStreams(device, device.device, recorder=recorder)
    executor.on_close(link.close)
    return Trained(executor, groups, link, issuer, watch, sums)


def host_steps(folder: Path, link: StepStreams, issuer: Issuer):
    """Three optimizers that step on the host with states on the drive; the states, and their optimizers."""
    parameters = [torch.nn.Parameter(torch.zeros(2000)) for _ in range(3)]
    steps = [FlatAdamW([parameter], fused=True) for parameter in parameters]
    reads = DriveReads(block_bytes=4096, queue_depth=3)
    states = DriveStates(folder, slots=2, settings=reads, link=link, issuer=issuer)
    for parameter, step in zip(parameters, steps):
        piece = Piece(parameter, lambda: torch.ones(2000), parameter.detach().half())
        states.units.append(DriveUnit(states, 0, step, [piece]))
    states.open()
    return states, steps


def train(rank: int, folder: Path, setup: str, stalls: bool) -> None:
    """A few iterations."""
    executor, groups, link, issuer, watch, sums = build(rank, folder, setup, stalls)
    states, steps = host_steps(folder, link, issuer)
    after_norm = AfterNorm(link)
    executor.on_close(states.close)
    executor.params_updated()
    for _ in range(ITERATIONS):
        executor.begin_iteration()
        if stalls and rank == 1:
            time.sleep(HANGS_AFTER)
        dist.all_reduce(torch.zeros(1), group=sums)  # as Megatron's, which knows of no failure
        executor.pre_forward(0, 0)
        dist.all_reduce(torch.zeros(1), group=sums)
        executor.pre_backward(0, 0)
        executor.post_backward(0)
        executor.end_iteration()
        for group in groups:
            group.shard.add_(1)
        states.expect(states.units)
        after_norm.expect([*states.units])
        for step in steps:
            step.step()
        executor.params_updated()
    executor.unshard_all()
    executor.close()
    watch.close()
    dist.barrier()


def begin(folder: Path, setup: str, site: tuple | None, hit: int) -> list[int]:
    """Fork the two ranks of a run, which stalls where ``hit`` is 0; returns their process numbers."""
    folder.mkdir()
    children = []
    for rank in range(2):
        child = os.fork()
        if child:
            children.append(child)
            continue
        code = 1
        try:
            out = os.open(folder / f"rank{rank}", os.O_WRONLY | os.O_CREAT)
            os.dup2(out, 1)
            os.dup2(out, 2)
            sys.stderr = sys.__stderr__ = os.fdopen(2, "w", closefd=False)
            tracer = Tracer(site if rank == 0 else None, hit, folder / "injected")
            threading.settrace(tracer)
            with faults.injected(publish_delay_ms=10 * rank):  # rank 0, where exceptions are raised, always waits
                train(rank, folder, setup, stalls=hit == 0)
            if site is None and rank == 0:
                (folder / "sites").write_text(json.dumps([[*key, count] for key, count in tracer.counts.items()]))
            code = 0
        except BaseException as error:
            traceback.print_exc()
            code = exit_code(error)
        finally:
            sys.stderr.flush()
            os._exit(code)
    return children


def ended(folder: Path, children: list[int], codes: dict[int, int], begun: float) -> dict | None:
    """What became of a run, or None while it runs."""
    hangs = time.monotonic() - begun > HANGS_AFTER
    for child in children:
        if child not in codes:
            if hangs:
                os.kill(child, 9)
            found, status = os.waitpid(child, 0 if hangs else os.WNOHANG)
            if found:
                codes[child] = os.waitstatus_to_exitcode(status)
    if len(codes) < len(children):
        return None
    told = folder / "injected"
    return {
        "hangs": hangs,
        "codes": [codes[child] for child in children],
        "seconds": time.monotonic() - float(told.read_text()) if told.exists() else None,
        "said": [(folder / f"rank{rank}").read_text(errors="replace") for rank in range(2)],
    }


def record(folder: Path, setup: str) -> dict[tuple, int]:
    """How often rank 0 executes each call site, ``(thread, file, line)``, when nothing fails."""
    children, codes, result = begin(folder, setup, None, 1), {}, None
    begun = time.monotonic()
    while result is None:
        time.sleep(0.005)
        result = ended(folder, children, codes, begun)
    assert result["codes"] == [0, 0], result["said"]
    return {tuple(site): count for *site, count in json.loads((folder / "sites").read_text())}


def slowed_down() -> float:
    """How many times as long as on an idle machine this process takes now, by other programs; 1 on an idle one."""
    begin = time.monotonic(), time.thread_time()
    while time.thread_time() - begin[1] < 0.2:
        pass
    return (time.monotonic() - begin[0]) / (time.thread_time() - begin[1])


def main() -> None:
    folder, every, known = Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 1, set()
    for file in (Path(PACKAGE) / "runtime").rglob("*.py"):
        lines_with_calls(str(file))
    parameter = torch.nn.Parameter(torch.zeros(1))
    parameter.grad = torch.zeros(1)
    torch.optim.Adam([parameter]).step()  # its first step imports for seconds: once here, not in every rank
    waiting, running, results, number = [], {}, [], 0
    slower = slowed_down()
    for setup in SETUPS:
        sites = record(folder / setup, setup)
        new = sorted((site, count) for site, count in sites.items() if site not in known)
        of_thread = [list(sites) for _, sites in groupby(new, lambda entry: entry[0][0])]
        waiting += [(setup, site, max(1, count // 4), 1) for sites in of_thread for site, count in sites[::every]]
        known |= set(sites)
    waiting.append(("one node", None, 0, TRIES))
    while waiting or running:
        while waiting and len(running) < AT_ONCE:
            setup, site, hit, tries = waiting.pop()
            place, number = folder / str(number), number + 1
            running[place] = (setup, site, tries, begin(place, setup, site, hit), {}, time.monotonic())
        for place, (setup, site, tries, children, codes, begun) in list(running.items()):
            result = ended(place, children, codes, begun)
            if result is None:
                continue
            del running[place]
            if result["seconds"] is None and tries < TRIES:  # a place that is reached only when something is late
                waiting.append((setup, site, 1, tries + 1))
            else:
                results.append({"setup": setup, "site": site, **result})
        time.sleep(0.005)
    slower = max(slower, slowed_down())
    print(json.dumps([{**result, "slower": slower} for result in results]))


if __name__ == "__main__":
    main()
