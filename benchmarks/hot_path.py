"""What a schedule costs the training thread in Python, beside Megatron's own pre-hooks.

    PYTHONPATH=.megatron python benchmarks/hot_path.py [--layers 12] [--out benchmarks/results/hot_path.json]

One rank of PP 2 x VP 2 with the parameters of a real GPT. Routes and layers do nothing, so that
what is left is our own Python (the executor's hooks, the compiled actions, states and versions)
and the module hooks that carry it; calling the same layers without a program is taken off. Time is
that of the thread (``time.thread_time_ns``), so that other programs on the machine do not count.
Megatron's pre-hook is called on every module of the model in the steady state of its gathers.

Some of it is torch's: resizing storages and hooks on gradients. What as many of these calls take
without anything of ours, in the same steps and a round for a round, is told apart (``torch_us_per_iteration``).
All is timed without the function mode through which CPU compatibility sees every call of torch, as
on a device, where there is none.
"""

import os
import sys
import time
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from statistics import median, quantiles

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests" / "helpers"))

from megatron_ext.megatron import cpu_compat

cpu_compat.install()

import machine
import torch
import torch.distributed as dist
from cases import LAYOUTS
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from msgspec.structs import replace
from torch_calls import Nothing, Noticing, TorchCalls, second_ns

from megatron_ext.megatron import describe_model, gpt_model, ignored_options
from megatron_ext.megatron.boundaries import Boundaries, Layer
from megatron_ext.planner.baselines import all_gpu
from megatron_ext.planner.random_plan import random_schedule
from megatron_ext.runtime.executor import Executor
from megatron_ext.runtime.group import Clock, FreedGroup, RankGroup, WholeBytes
from megatron_ext.runtime.issuer import Issuer
from megatron_ext.runtime.program import compile_program, place_actions
from megatron_ext.schedule.group_facts import uses_of_groups
from megatron_ext.workload.step_order import steps_of_ranks

PARALLEL = [*LAYOUTS["interleaved"], "--untie-embeddings-and-output-weights"]


class Arrived:
    """What a gather that has arrived is waited by: as with torch's own, a call from Python into C."""

    wait = bool


class Route:
    """A gather that has always arrived."""

    def __init__(self):
        self.arrived = Arrived()

    def issue(self, group):
        return self.arrived


def layers_that_do_nothing(workload, schedule, module=Nothing) -> tuple[Boundaries, list[list[Layer]]]:
    layers = [[Layer(kind, module(), ()) for kind in chunk.layer_kinds] for chunk in workload.chunks_of_rank(0)]
    uses = dict(enumerate(uses_of_groups(schedule.groups, workload)))
    boundaries = Boundaries([], uses, [[(n, n) for n in range(len(chunk))] for chunk in layers])
    boundaries.layers = layers
    return boundaries, layers


def executor_of(schedule, workload, boundaries) -> Executor:
    residency, clock, route = WholeBytes(), Clock(), Route()
    groups = {}
    for index, group in enumerate(schedule.groups):
        if group.pp_rank == 0:
            whole = torch.zeros(256)  # sizes do not matter here
            groups[index] = (
                FreedGroup(index, "", whole, 0, 2, residency)
                if schedule.zero_stage == 3
                else RankGroup(index, "", whole, 0, 2)
            )
    placed = place_actions(schedule, schedule.ranks[0], groups, {"gpu": route, "cpu": route}, clock, boundaries)
    program = compile_program(placed, boundaries)
    executor = Executor(program, groups, clock, residency, route.issue, Issuer())
    executor.params_updated()
    return executor


def iteration_ns(workload, layers, executor) -> int:
    """Thread time of all steps of rank 0 with layers that do nothing."""
    counts, begin_of_chunk = {"F": 0, "B": 0}, torch.zeros(1, requires_grad=True)
    outputs: dict[tuple, torch.Tensor] = {}
    begin = time.thread_time_ns()
    if executor is not None:
        executor.begin_iteration()
    for stage, kind, microbatch in steps_of_ranks(workload.parallel)[0]:
        chunk, number = stage // workload.parallel.pp, counts[kind]
        counts[kind] += 1
        if kind == "F":
            if executor is not None:
                executor.pre_forward(number, chunk)
            hidden = begin_of_chunk
            for layer in layers[chunk]:
                hidden = layer.module(hidden_states=hidden)
            outputs[stage, microbatch] = hidden
        else:
            if executor is not None:
                executor.pre_backward(number, chunk)
            outputs.pop((stage, microbatch)).backward()
            if executor is not None:
                executor.post_backward(number)
    if executor is not None:
        executor.end_iteration()
        executor.params_updated()
    return time.thread_time_ns() - begin


def scheduled(workload, schedule, rounds: int) -> dict:
    boundaries, layers = layers_that_do_nothing(workload, schedule, Noticing)
    calls = TorchCalls(executor_of(schedule, workload, boundaries), layers, partial(iteration_ns, workload))
    boundaries, layers = layers_that_do_nothing(workload, schedule)
    executor = executor_of(schedule, workload, boundaries)
    ours, of_torch = [], []
    with getattr(torch._C, "DisableTorchFunction", nullcontext)():
        for _ in range(rounds):
            took = [second_ns(iteration_ns, workload, layers, by) for by in (executor, None)]
            ours.append((took[0] - took[1]) / 1e3)
            of_torch.append(calls.ns() / 1e3)
    pairs = sum(
        len(workload.chunk(0, step.stage // workload.parallel.pp).parameters)
        for step in steps_of_ranks(workload.parallel)[0]
    )
    tenths = quantiles(ours, n=10)
    own = median(ours) - median(of_torch)
    return {
        "us_per_iteration": median(ours),
        "p10_us": tenths[0],
        "p90_us": tenths[-1],
        "us_per_parameter_and_step": median(ours) / pairs,
        "torch_us_per_iteration": median(of_torch),
        "hooks": calls.hooks,
        "resizes": calls.resizes,
        "own_us_per_parameter_and_step": own / pairs,
        "groups": len(schedule.groups),
    }


def stock(options, rounds: int) -> dict:
    """Megatron's own pre-hook on every module of a model of the same size."""
    args = ignored_options.parse([*options, "--untie-embeddings-and-output-weights"])
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    config = gpt_model.transformer_config(args)
    (chunk,) = gpt_model.build_chunks(args, config)
    ddp_config = DistributedDataParallelConfig(
        use_distributed_optimizer=True, overlap_grad_reduce=True, overlap_param_gather=True
    )
    ddp = DistributedDataParallel(config, ddp_config, chunk)
    hook, modules = ddp._make_forward_pre_hook(), list(ddp.module.modules())
    for module in modules:
        hook(module)
    parameters, found = sum(1 for _ in ddp.module.parameters()), []
    with getattr(torch._C, "DisableTorchFunction", nullcontext)():
        for _ in range(rounds):
            begin = time.thread_time_ns()
            for module in modules:
                hook(module)
            found.append((time.thread_time_ns() - begin) / 1e3)
    dist.destroy_process_group()
    return {
        "us_per_forward": median(found),
        "us_per_parameter_and_step": median(found) / parameters,
        "modules": len(modules),
        "parameters": parameters,
    }


def main() -> int:
    args = machine.options(__doc__, layers=12, rounds=300, out=ROOT / "benchmarks/results/hot_path.json")
    size = ["--num-layers", str(args.layers), "--hidden-size", "64", "--num-attention-heads", "4", "--seq-length", "32"]
    workload = describe_model.describe_options(ignored_options.parse([*PARALLEL, *size]))
    third = replace(workload, zero_stage=3)
    largest_chunk = max(chunk.bytes for chunk in workload.chunks)
    schedules = {
        "all-gpu, zero stage 1": (workload, all_gpu(workload)),
        "random, zero stage 1": (workload, random_schedule(workload, ("gpu", "cpu"), 1)),
        "all-gpu, zero stage 3": (third, all_gpu(third)),
        "random, zero stage 3": (third, random_schedule(third, ("gpu", "cpu"), 1)),
    }
    tight = replace(third, limits=replace(third.limits, whole_parameter_bytes=largest_chunk * 3 // 4))
    schedules["layer by layer, zero stage 3"] = (tight, random_schedule(tight, ("gpu", "cpu"), 1))
    found = {name: scheduled(*pair, args.rounds) for name, pair in schedules.items()}
    found["Megatron's pre-hooks"] = stock(size, args.rounds)
    for name, row in found.items():
        own = f", our own Python {row['own_us_per_parameter_and_step']:.4f}" if "hooks" in row else ""
        print(f"{name:32} {row['us_per_parameter_and_step']:.4f} us a parameter and step{own}")
    result = {"command": f"python benchmarks/hot_path.py --layers {args.layers}", "rows": found}
    machine.write(args.out, result, load_before=os.getloadavg()[0])
    return 0


if __name__ == "__main__":
    sys.exit(main())
