"""Megatron as shipped, or by a schedule of ours: the main job with a census from outside. Part of peers.py.

    peer_megatron.py OPTIONS      those of examples/pretrain_gpt_hybrid.py

The last iteration is looked at by the census; its time is not counted.
"""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

import pretrain_gpt_hybrid as job  # first: it makes Megatron work without a CUDA device
import torch
import torch.distributed as dist
from peer_census import Census

from megatron_ext.megatron import hooks
from megatron_ext.runtime.executor import Executor
from megatron_ext.runtime.gradients import Reducer
from megatron_ext.runtime.group import FreedGroup


def offloaded(optimizer) -> Iterator[torch.Tensor]:
    """What Megatron's host optimizer holds."""
    for one in getattr(optimizer, "chained_optimizers", [optimizer]):
        host = one.optimizer
        if hasattr(host, "gpu_params_map_cpu_copy"):
            yield from host.gpu_params_map_cpu_copy.values()
            yield from (grad for grad in host.cpu_copy_map_grad.values() if grad is not None)
            for inner in host.sub_optimizers:
                for state in inner.state.values():
                    yield from (value for value in state.values() if isinstance(value, torch.Tensor))


def on_host(optimizer) -> Iterator[torch.Tensor]:
    """What a run by a schedule keeps in host memory besides."""
    yield from offloaded(optimizer)
    executor: Executor | None = getattr(hooks.active(), "executor", None)
    if executor is None:
        return
    for group in executor.groups.values():
        if isinstance(group, FreedGroup) and group.on_host:
            yield group.shard
    if executor.pool is not None:
        yield from (block.memory for block in executor.pool.blocks)
    reducer = executor.part(Reducer)
    if reducer is not None:
        yield from (reducer.gradients[index].shard for index in reducer.on_host)


def main() -> None:
    build, run, sync, save = job.build_model_and_optimizer, job.run_schedule, job.force_param_sync, job.save_metrics
    state: dict = {"calls": 0}

    def building(args):
        model, optimizer, config = build(args)
        state["census"] = Census(model, lambda: on_host(optimizer))
        return model, optimizer, config

    def running(args, model, iterators, forward_only=False):
        state["calls"] += 1
        if state["calls"] == args.train_iters:
            reads = getattr(getattr(hooks.active(), "executor", None), "reads", None)
            if reads is not None:  # the census looks at parameters without a gather of them
                state["census"].sample = reads.unnoticed(state["census"].sample)
            state["census"].begin()
        return run(args, model, iterators, forward_only)

    def syncing(model, args):  # all parameters whole, behind the last iteration
        state["held"] = state["census"].end()
        sync(model, args)

    def saving(args, metrics):
        everybody = [None] * dist.get_world_size()
        dist.all_gather_object(everybody, state["held"])
        metrics["held"] = max(everybody)
        metrics["iteration_us"] = metrics["iteration_us"][:-1]
        save(args, metrics)

    job.build_model_and_optimizer, job.run_schedule = building, running
    job.force_param_sync, job.save_metrics = syncing, saving
    code = job.main()
    sys.stdout.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
