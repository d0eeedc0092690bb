"""What is done beside a training of ``parity_worker.py``: parameters are read or changed, iterations overflow.

Each takes the example's module and is there while a model is built and trained.
"""

import contextlib
import functools
import importlib
from unittest import mock

import model_and_optimizer
import torch
import torch.distributed as dist
from engine_stand_in import FusedAdam
from megatron.core import num_microbatches_calculator as calculator
from megatron.core import optimizer as megatron_optimizer
from megatron.core.optimizer import distrib_optimizer
from ran_again import ran_again
from random_rows import Rows

RAMP = [4, 4, 8]
"""As --rampup-batch-size takes it."""
STEPS = ((0, 4), (4, 8), (12, 12))
"""The same as (samples, batch size), for releases that have --step-batch-size-schedule in its place."""
TIMES_TOLD = {"silent": 0, "told": 1, "told twice": 2}


@contextlib.contextmanager
def meddling(example, told: int):
    """Halve all parameters before the second iteration, and say so to the hooks ``told`` times; yields the
    hash of the parameters before the first."""
    run_schedule, hashes = example.run_schedule, []

    def run(args, model, iterators, forward_only: bool = False):
        if not forward_only and not hashes:
            example.force_param_sync(model, args)
            hashes.append(example.parameter_hash(model))
        elif not forward_only:
            hashes.append(None)
        if not forward_only and len(hashes) == 2:
            example.force_param_sync(model, args)
            with torch.no_grad():
                for chunk in model:
                    for parameter in chunk.parameters():
                        parameter.data.mul_(0.5)
            for _ in range(told):
                example.hooks.params_changed()
        return run_schedule(args, model, iterators, forward_only)

    with mock.patch.object(example, "run_schedule", run):
        yield hashes


@contextlib.contextmanager
def reading(example):
    """Read all parameters before every iteration, as a norm that is logged does, through views taken at the start, and
    in the states of chunks; yields what was read and what they are when all are gathered."""
    run_schedule, reads, views = example.run_schedule, [], []

    def values(tensors) -> list[str]:
        return [tensor.sum().item().hex() for tensor in tensors]

    def in_states(model):
        from megatron_ext.megatron.boundaries import bare  # not in an older package, see old_code.py

        for module in map(bare, model):
            state = module.state_dict()
            yield from (state[name] for name, _ in module.named_parameters())

    def run(args, model, iterators, forward_only: bool = False):
        parameters = [parameter for chunk in model for parameter in chunk.parameters()]
        views.extend([] if views else [parameter.data.view(-1) for parameter in parameters])
        if not forward_only:
            noticed = values((parameters, views, in_states(model))[len(reads) % 3])
            example.force_param_sync(model, args)
            reads.append((noticed, values(parameters)))
        return run_schedule(args, model, iterators, forward_only)

    with mock.patch.object(example, "run_schedule", run):
        yield reads


@contextlib.contextmanager
def evaluating(example):
    """A forward alone before every second iteration, for which nothing asks for parameters; yields the losses."""
    run_schedule, losses, count = example.run_schedule, [], 0

    def run(args, model, iterators, forward_only: bool = False):
        nonlocal count
        count += not forward_only
        if not forward_only and count % 2 == 0:
            with torch.no_grad():
                found = run_schedule(args, model, [example.batches_of(args, Rows(args)) for _ in model], True)
            losses.append([{name: value.tolist() for name, value in one.items()} for one in found])
        return run_schedule(args, model, iterators, forward_only)

    with mock.patch.object(example, "run_schedule", run):
        yield losses


@contextlib.contextmanager
def overflowing(example):
    """Before every third iteration set a loss scale at which gradients overflow, before the others one at which they do
    not; yields nothing."""
    run_schedule, build, optimizers, count = example.run_schedule, example.build_model_and_optimizer, [], 0

    def built(args):
        made = build(args)
        optimizers.extend(getattr(made[1], "chained_optimizers", [made[1]]))
        return made

    def run(args, model, iterators, forward_only: bool = False):
        nonlocal count
        if not forward_only:
            count += 1
            for optimizer in optimizers:
                optimizer.grad_scaler.scale.fill_(2.0**40 if count % 3 == 0 else 2.0**10)
        return run_schedule(args, model, iterators, forward_only)

    with mock.patch.multiple(example, run_schedule=run, build_model_and_optimizer=built):
        yield


@contextlib.contextmanager
def fused():
    """The optimizer of a host optimizer's parameters on the device is the stand-in of Transformer Engine's: it rounds
    otherwise than torch's on the host, and has its count of steps elsewhere; yields nothing."""
    with (
        mock.patch.object(megatron_optimizer, "Adam", FusedAdam),
        mock.patch.object(distrib_optimizer, "HAVE_APEX_OR_TE", True),
        mock.patch.object(distrib_optimizer, "USING_TE_OPTIMIZER", True),
    ):
        yield


@contextlib.contextmanager
def split(example):
    """--overlap-param-gather-with-optimizer-step: the first chunk has an optimizer of its own, after whose step
    Megatron begins to gather it; yields nothing."""
    config = functools.partial(megatron_optimizer.OptimizerConfig, overlap_param_gather_with_optimizer_step=True)
    with mock.patch.object(model_and_optimizer, "OptimizerConfig", config):
        yield


@contextlib.contextmanager
def ramping(example):
    """--rampup-batch-size or --step-batch-size-schedule: Megatron's own calculator says before every iteration how many
    micro-batches it has; yields these numbers."""
    run_schedule, build, numbers, consumed = example.run_schedule, example.build_model_and_optimizer, [], 0

    def built(args):
        sizes = args.global_batch_size, args.micro_batch_size, args.data_parallel_size
        from megatron_ext.megatron.releases import ramps_up  # old code, which old_code.py trains with, has no such file

        if ramps_up():
            args.rampup_batch_size = RAMP
            calculator.init_num_microbatches_calculator(dist.get_rank(), RAMP, *sizes)
        else:
            steps = " ".join(f"{samples * args.seq_length}:{batch}" for samples, batch in STEPS)
            args.step_batch_size_schedule = steps
            more = {"step_batch_size_schedule": steps, "seq_length": args.seq_length}
            calculator.init_num_microbatches_calculator(dist.get_rank(), None, *sizes, **more)
        return build(args)

    def run(args, model, iterators, forward_only: bool = False):
        nonlocal consumed
        if not forward_only:
            calculator.update_num_microbatches(consumed)
            consumed += calculator.get_current_global_batch_size()
            args.num_microbatches = calculator.get_num_microbatches()
            numbers.append(args.num_microbatches)
        return run_schedule(args, model, iterators, forward_only)

    try:
        with mock.patch.multiple(example, run_schedule=run, build_model_and_optimizer=built):
            yield numbers
    finally:
        calculator.unset_num_microbatches_calculator()


@contextlib.contextmanager
def other_states(example):
    """The host's optimizer has other parameters than the model, as Megatron may read them from a checkpoint."""
    setup = example.hooks.on_train_setup

    def with_others(args, model, optimizer, config) -> None:
        for one in getattr(optimizer, "chained_optimizers", [optimizer]):
            for copy in one.optimizer.gpu_params_map_cpu_copy.values():
                copy.data.add_(1)
        setup(args, model, optimizer, config)

    with mock.patch.object(example.hooks, "on_train_setup", with_others):
        yield


SURROUNDINGS = {
    "other states": other_states,
    "toy route": lambda example: importlib.import_module("toy_route").added(),  # older packages, too, run this file
    "evaluate": evaluating,
    "overflow": overflowing,
    "fused": lambda example: fused(),
    "split": split,
    "ramp": ramping,
    "again": ran_again,
}
