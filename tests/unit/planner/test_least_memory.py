"""What fits, and what does not: the least plan and its refusals against every way to keep a few groups."""

import random
import re
from itertools import product

import pytest
from msgspec.structs import replace
from ortools.sat.python import cp_model
from parallel_sizes import sized
from planning_cases import WHOLE, line, make_table, make_workload
from variations import some

from megatron_ext.bounds.host_room import optimizer_on_host
from megatron_ext.formats.errors import InputError
from megatron_ext.planner import least_memory, plan
from megatron_ext.planner.least_memory import least_plan
from megatron_ext.planner.problem import Problem
from megatron_ext.planner.reroute import rerouted
from megatron_ext.planner.stock import stock_schedule
from megatron_ext.planner.without_plan import stock_bytes
from megatron_ext.schedule.footprint import pinned_host_bytes
from megatron_ext.schedule.group_facts import steps_on_host_shards
from megatron_ext.schedule.match import match
from megatron_ext.schedule.memory_bill import host_bytes_of_nodes, memory_bill
from megatron_ext.schedule.validate import validate
from megatron_ext.simulator.timing import Timing
from megatron_ext.workload import workload as workload_file
from megatron_ext.workload.bucket_rules import layer_buckets
from megatron_ext.workload.optimizer_settings import OptimizerSettings
from megatron_ext.workload.workload import Chunk, Limits, Parameter

ROUTES = ("gpu", "cpu", "cpu_shard")


def drawn(seed: int):
    """Two or three unlike layers in all, on one pipeline rank or two."""
    draw = random.Random(seed)
    pp, zero_stage = draw.choice((1, 1, 2)), draw.choice((2, 3, 3))
    parallel = sized(pp=pp, vp=1, dp=2, microbatches=2, order="1f1b" if pp > 1 else "no_pipeline")
    chunks = []
    for rank in range(pp):
        parameters = [
            Parameter(name=f"l{layer}.{n}", shape=(size,), dtype="bfloat16", bytes=2 * size, layer=layer)
            for layer in range(draw.choice((2, 3)) if pp == 1 else 1)
            for n, size in enumerate((256 * draw.randint(1, 40), 256 * draw.randint(1, 8)))
        ]
        saved = tuple(draw.randint(1, 8) * 1000 for _ in range(parameters[-1].layer + 1))
        chunks.append(Chunk(pp_rank=rank, model_chunk_id=0, parameters=tuple(parameters), activation_bytes=saved))
    made = {"schema_version": workload_file.SCHEMA_VERSION, "kind": "workload"}
    work = workload_file.Workload(**made, parallel=parallel, chunks=tuple(chunks), zero_stage=zero_stage)
    table = make_table(work, gpu=(20.0, 2e3), cpu=(10.0, 3e3), publish=(5.0, 5e3))
    return work, replace(table, reduce=line(20.0, 1.5e3), host_add=line(1.0, 1e4))


def everything(work) -> set[tuple[int, int]]:
    """Of every way to keep every group: bytes of the fullest rank on its device, and of the fullest node's host."""
    found = set()
    for cut in (layer_buckets, lambda chunk: [[p] for p in chunk.parameters]):
        stream = stock_schedule(replace(work, limits=Limits(whole_parameter_bytes=1)), cut)
        stream = replace(stream, limits=work.limits)
        rests = (None, "host") if work.zero_stage == 3 and steps_on_host_shards(work.optimizer, "bfloat16") else (None,)
        for ways in product(product((None, "sharded", "host"), rests), repeat=len(stream.groups)):
            groups = tuple(
                replace(group, gradients=gradients, alone=gradients is not None, shard_rests=rest)
                for group, (gradients, rest) in zip(stream.groups, ways)
            )
            routed = ["cpu_shard" if rest else "gpu" for _, rest in ways]
            schedule = rerouted(replace(stream, groups=groups), lambda action, routed=routed: routed[action.group])
            device = max(bill.memory.device_total_bytes for bill in memory_bill(schedule, work))
            found.add((device, max(host_bytes_of_nodes(schedule, work))))
    return found


def least(work, table):
    reliefs = frozenset(("sharded", "host", "alone", *(["shards"] if work.zero_stage == 3 else [])))
    return least_plan(Problem(work, Timing(work, table), ROUTES), reliefs)


def within(work, device: int, host: int):
    return replace(work, limits=Limits(device_bytes=device, host_bytes=host))


@pytest.mark.parametrize("seed", some(range(6), 3))
def test_what_fits_by_any_way_has_a_plan_and_nothing_else_has(seed):
    work, table = drawn(seed)
    possible = everything(work)
    frontier = [one for one in possible if not any(o != one and o[0] <= one[0] and o[1] <= one[1] for o in possible)]
    assert len(frontier) > 1
    for device, host in sorted(frontier):
        limited = within(work, device, host)
        found = validate(least(limited, table))
        match(found, limited)
        assert max(bill.memory.device_total_bytes for bill in memory_bill(found, limited)) <= device
        assert max(host_bytes_of_nodes(found, limited)) <= host
    for device, host in random.Random(seed).sample(sorted(frontier), min(len(frontier), 3)):
        for less in (within(work, device - 1, host), within(work, device, max(host - 1, 0))):
            limits = less.limits
            if not any(d <= limits.device_bytes and h <= limits.host_bytes for d, h in possible):
                with pytest.raises(InputError, match="cannot fit"):
                    least(less, table)


def test_the_bytes_of_a_refusal_are_the_least_there_are():
    work, table = drawn(2)
    possible = everything(work)
    device = min(device for device, _ in possible)
    with pytest.raises(InputError, match=rf"limits.device_bytes = {device - 1}: .* holds at least {device} bytes"):
        plan(within(work, device - 1, 1 << 40), table)
    host = min(host for held, host in possible if held <= device)
    assert host > 0
    with pytest.raises(InputError) as refused:
        plan(within(work, device, host - 1), table)
    text = str(refused.value)
    need, kinds, short = re.search(
        r"cannot fit by any plan that was found: .* node 0 holds (\d+) bytes in host memory \((.*?)\).*?, (\d+) bytes",
        text,
    ).groups()
    assert refused.value.field == "limits.host_bytes" and int(need) == host and int(short) == 1
    assert sum(map(int, re.findall(r"\d+", kinds))) == host  # all of it is the node's


def test_a_refusal_names_the_limit_of_host_memory_that_is_short():
    work, table = drawn(0)
    device = min(device for device, _ in everything(work))
    with pytest.raises(
        InputError, match=rf"on its device .* bytes more than limits.device_bytes = {device}"
    ) as refused:
        plan(replace(work, limits=Limits(device_bytes=device, pinned_host_bytes=1)), table)
    assert (refused.value.field, refused.value.value) == ("limits.pinned_host_bytes", 1)


@pytest.mark.parametrize("host_bytes", (None, 1 << 40))
def test_what_a_run_refuses_although_it_fits_is_refused_for_the_reason_of_the_run(host_bytes, monkeypatch):
    work, table = drawn(0)
    device = min(device for device, _ in everything(work))

    def refused(*_) -> None:
        raise InputError("is of another model", field="groups")

    monkeypatch.setattr(least_memory, "match", refused)
    with pytest.raises(InputError, match="groups: is of another model"):
        least(replace(work, limits=Limits(device_bytes=device, host_bytes=host_bytes)), table)


def test_where_the_solver_finds_nothing_fast_in_time_what_takes_least_host_memory_is_the_plan(monkeypatch):
    work, table = drawn(2)
    device, host = min(everything(work))
    solve = cp_model.CpSolver.solve

    def solved(self, model):  # the sum of times of all ways, or one variable: the bytes of the fullest
        return cp_model.UNKNOWN if len(model.proto.objective.vars) > 1 else solve(self, model)

    monkeypatch.setattr(cp_model.CpSolver, "solve", solved)
    for limit in (host - 1, host):
        limited = within(work, device, limit)
        if limit == host:
            assert host_bytes_of_nodes(least(limited, table), work) == [host]
        else:
            with pytest.raises(
                InputError, match=f"cannot fit by any plan that was found: .* holds {host} bytes in host memory"
            ):
                least(limited, table)


@pytest.mark.parametrize("seed", some(range(6), 3))
def test_the_least_bytes_are_known_and_planned_without_the_solver(seed, monkeypatch):
    work, table = drawn(seed)
    device = min(device for device, _ in everything(work))
    monkeypatch.setattr(cp_model.CpSolver, "solve", lambda *_: cp_model.UNKNOWN)  # its work did not suffice
    found = least(replace(work, limits=Limits(device_bytes=device)), table)
    assert max(bill.memory.device_total_bytes for bill in memory_bill(found, work)) == device
    pinned, host = max(pinned_host_bytes(found)), max(host_bytes_of_nodes(found, work))
    limits = Limits(device_bytes=device, host_bytes=host, pinned_host_bytes=pinned or None)
    assert least(replace(work, limits=limits), table).groups == found.groups
    if pinned:
        with pytest.raises(InputError):
            least(replace(work, limits=replace(limits, pinned_host_bytes=1)), table)
    with pytest.raises(InputError, match=f"holds at least {device} bytes"):
        least(replace(work, limits=Limits(device_bytes=device - 1)), table)


@pytest.mark.parametrize("part", some((0.0, 0.6, 0.3, 1.0), 2))
def test_a_plan_keeps_both_limits_and_more_host_memory_makes_no_plan_slower(part):
    work, table = drawn(5)
    possible = everything(work)
    device = sorted({device for device, _ in possible})[len({device for device, _ in possible}) // 4]
    lowest = min(host for held, host in possible if held <= device)
    free = plan(replace(work, limits=Limits(device_bytes=device)), table)
    most = max(host_bytes_of_nodes(free, work))
    limit = round(lowest + part * max(most - lowest, 0))
    planned = plan(within(work, device, limit), table)
    assert max(memory.device_total_bytes for memory in planned.predicted.memory) <= device
    assert max(host_bytes_of_nodes(planned, work)) <= limit
    assert free.predicted.iteration_time_us <= planned.predicted.iteration_time_us * 1.01


def test_states_stay_in_memory_where_host_copies_are_not_worth_the_drive():
    """Host memory for the optimizer alone: copies have room only where states go to the drive, which is slow."""
    work = make_workload(pp=1, vp=1, dp=2, order="no_pipeline", layers=12, zero_stage=3, microbatches=2)
    work = replace(work, optimizer=OptimizerSettings(on_host=True))
    table = make_table(work, gpu=(20.0, 5e2), nvme=(5000.0, 1.0), publish=(5.0, 5e3), optimizer=line(10.0, 1e9))
    (optimizer,) = optimizer_on_host(work, on_drive=False)
    (node,) = host_bytes_of_nodes(plan(work, table), work)
    assert node > optimizer * 1.05  # with room, there are copies
    for part, states in ((1.01, {None}), (0.8, {None, "nvme"})):
        limited = replace(work, limits=Limits(host_bytes=round(part * optimizer)))
        planned = plan(limited, table)
        assert max(host_bytes_of_nodes(planned, work)) <= part * optimizer
        assert {group.states_rest for group in planned.groups} >= states
        assert "nvme" in states or {group.states_rest for group in planned.groups} == states


def test_what_is_gathered_before_the_first_step_has_a_route():
    """So it is at zero stage 2 with several chunks a rank."""
    work = make_workload(pp=2, vp=2, dp=2, microbatches=4, layers=1, order="interleaved", zero_stage=2)
    work = replace(work, limits=Limits(device_bytes=stock_bytes(work)[0] * 9 // 10))
    table = make_table(work, gpu=(10.0, 1e3), **WHOLE, host_add=line(10.0, 1e4))
    assert all(rank.start.unshard for rank in plan(work, table).ranks)
