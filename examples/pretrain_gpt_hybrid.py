"""Train a GPT with megatron.core; with --user-defined-schedule, gather parameters by the schedule.

This is plain Megatron except for four calls: two pass our options to the package, one tells it that
training begins and one that training has ended. Options have Megatron's names.

    torchrun --nproc-per-node 4 examples/pretrain_gpt_hybrid.py \
        --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 \
        --data-path runs/corpus/stdlib --train-iters 24 --user-defined-schedule schedule.json
"""

import functools
import hashlib
import os
import random
import sys
import time
import traceback
from datetime import timedelta
from functools import partial
from typing import NoReturn

import numpy
import torch
import torch.distributed as dist

from megatron_ext.formats import json_files
from megatron_ext.megatron import cpu_compat, gpt_arguments, hooks, one_line_end
from megatron_ext.runtime import free_host_memory, own_device
from megatron_ext.runtime.device import has_cuda

cpu_compat.install()  # does nothing where there is a CUDA device

import batches
import checkpoint
import corpus
from iteration_log import iteration_log, kept_once
from megatron.core import parallel_state, tensor_parallel
from megatron.core.pipeline_parallel import get_forward_backward_func
from model_and_optimizer import build_model_and_optimizer
from turns import Turns

from megatron_ext.megatron import gpt_model


def parse_args():
    parser = gpt_arguments.OneLineParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    gpt_arguments.add_gpt_arguments(parser)
    hooks.add_arguments(parser)
    training = parser.add_argument_group("training")
    training.add_argument("--data-path", required=True, help="Prefix of an indexed dataset (.bin and .idx).")
    training.add_argument("--data-cache-path", default=None)
    training.add_argument("--train-iters", type=int, default=24)
    training.add_argument("--lr", type=float, default=1e-3)
    training.add_argument("--clip-grad", type=float, default=1.0)
    training.add_argument("--weight-decay", type=float, default=0.01)
    training.add_argument(
        "--optimizer-cpu-offload", action="store_true", help="Keep the optimizer's states on the host and step there."
    )
    training.add_argument("--loss-scale", type=float, default=None)
    training.add_argument("--initial-loss-scale", type=float, default=2**16)
    training.add_argument("--seed", type=int, default=1234)
    training.add_argument(
        "--init-by-name", action="store_true", help="Make initial values independent of the parallel sizes."
    )
    training.add_argument("--no-overlap-param-gather", action="store_false", dest="overlap_param_gather")
    training.add_argument("--eval-interval", type=int, default=None)
    training.add_argument("--eval-iters", type=int, default=2)
    training.add_argument("--save", default=None)
    training.add_argument("--load", default=None)
    training.add_argument("--save-interval", type=int, default=None)
    training.add_argument("--log-interval", type=int, default=1)
    training.add_argument(
        "--progress-bar", default=None, metavar="TITLE", help="Show a progress bar in place of one line per iteration."
    )
    training.add_argument(
        "--interleave",
        default=None,
        metavar="DIRECTORY,NUMBER,ITERATIONS",
        help="Take turns with another run, of ITERATIONS iterations each: see turns.py.",
    )
    training.add_argument(
        "--metrics-path", default=None, help="Write losses, gradient norms, times and parameter hashes as JSON."
    )
    return parser.parse_args()


def initialize(args) -> None:
    """Set up process groups, parallel sizes and seeds of this rank."""
    backend = args.distributed_backend or ("nccl" if has_cuda() else "gloo")
    timeout = timedelta(minutes=args.distributed_timeout_minutes)
    if has_cuda():
        device = own_device.take(int(os.environ.get("LOCAL_RANK", 0)))
        dist.init_process_group(backend, timeout=timeout)
        # Needed if a node has fewer GPUs than ranks.
        own_device.tell_nccl(device, nodes=dist.get_world_size() // int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
    else:
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", 1)))
        dist.init_process_group(backend, timeout=timeout)
    gpt_model.initialize_parallel(args)
    set_seeds(args)


def set_seeds(args) -> None:
    # Stages have different parameters, replicas have the same.
    seed = args.seed + 100 * parallel_state.get_pipeline_model_parallel_rank()
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)


def build_datasets(args):
    """Samples for training and for validation. Collective."""
    return batches.build_datasets(
        args.data_path,
        seq_length=args.seq_length,
        seed=args.seed,
        cache_path=args.data_cache_path,
        train_samples=args.train_iters * args.global_batch_size,
        valid_samples=args.eval_iters * args.global_batch_size if args.eval_interval else 1,
    )


def batches_of(args, dataset, start_iteration: int = 0):
    """This rank's micro-batches from ``start_iteration`` on: int64 ``tokens`` of shape (micro-batch, sequence), and
    labels, loss mask and position ids."""
    return batches.batches(
        dataset,
        micro_batch_size=args.micro_batch_size,
        global_batch_size=args.global_batch_size,
        start_iteration=start_iteration,
    )


def loss_func(loss_mask, output):
    """Mean loss over the tokens that ``loss_mask`` (micro-batch, sequence) keeps. ``output`` is the loss per token."""
    mask = loss_mask.view(-1).float()
    loss = torch.sum(output.float().view(-1) * mask) / mask.sum()
    return loss, {"lm loss": loss.detach().clone()}


@functools.cache
def causal_mask(seq: int, device):
    """Bool, shape (1, 1, sequence, sequence): true for positions that a token must not attend to."""
    return torch.tril(torch.ones((1, 1, seq, seq), device=device)) < 0.5


def forward_step(data_iterator, model):
    """Megatron's ``forward_step_func``: one micro-batch through one chunk."""
    batch = next(data_iterator)
    seq = batch["tokens"].shape[1]
    mask = causal_mask(seq, batch["tokens"].device)
    output = model(batch["tokens"], batch["position_ids"], mask, labels=batch["labels"])
    return output, partial(loss_func, batch["loss_mask"])


def run_schedule(args, model, iterators, forward_only: bool = False, step=forward_step) -> list[dict]:
    """Run all micro-batches of one iteration, in Megatron's order. Returns the losses of all micro-batches on the last
    stage, an empty list on others."""
    return get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=iterators if len(model) > 1 else iterators[0],
        model=model if len(model) > 1 else model[0],
        num_microbatches=args.num_microbatches,
        seq_length=args.seq_length,
        micro_batch_size=args.micro_batch_size,
        forward_only=forward_only,
    )


def mean_loss(losses: list[dict]) -> float:
    """Loss of an iteration, averaged over the replicas of the last stage; the same on every rank. Collective."""
    value = torch.zeros(1)
    if losses:
        value[0] = torch.stack([row["lm loss"] for row in losses]).float().mean().cpu()
    if has_cuda():
        value = value.cuda()
    dist.all_reduce(value, group=parallel_state.get_data_parallel_group())
    last = torch.distributed.get_world_size() - 1
    dist.broadcast(value, src=last)
    return value.item() / parallel_state.get_data_parallel_world_size()


def parameter_hash(model) -> str:
    """sha256 over every parameter of this rank. Collective, after :func:`force_param_sync`."""
    digest = hashlib.sha256()
    for chunk in model:
        for name, parameter in chunk.named_parameters():
            digest.update(name.encode())
            copied = parameter.detach().to("cpu", copy=True)  # torch cannot free storage that a NumPy array was made of
            digest.update(copied.contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def force_param_sync(model, args) -> None:
    """Make all parameters whole, in the way Megatron does before evaluation and checkpoints."""
    if args.overlap_param_gather:
        for chunk in model:
            chunk.disable_forward_pre_hook(param_sync=True)
        for chunk in model:
            chunk.enable_forward_pre_hook()


def train(args, model, optimizer, config, datasets) -> dict:
    """Train and return this rank's metrics (megatron_ext/formats/metrics.py)."""
    args.iteration = iteration = checkpoint.load(args.load, model, optimizer) if args.load else 0
    hooks.on_train_setup(args, model, optimizer, config)
    iterators = [batches_of(args, datasets[0], iteration) for _ in model]
    metrics = {"loss": [], "grad_norm": [], "iteration_us": [], "eval_loss": [], "peak_bytes": 0, "census": []}
    for chunk in model:
        chunk.train()
    log = iteration_log(
        args.train_iters, start=iteration, every=args.log_interval, title=args.progress_bar, silent=dist.get_rank() > 0
    )
    turns = Turns(args.interleave, writes=dist.get_rank() == 0) if args.interleave else None
    if turns is not None:
        metrics["turn_iterations"] = turns.iterations
    saved, kept = None, {}
    while iteration < args.train_iters:
        if turns is not None:
            turns.before(iteration)
        dist.barrier()
        start = time.perf_counter_ns()
        for chunk in model:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        losses = run_schedule(args, model, iterators)
        updated, grad_norm, _ = optimizer.step()
        if has_cuda():  # so far Adam and the first gathers are only queued
            torch.cuda.current_stream().synchronize()
        elapsed = (time.perf_counter_ns() - start) / 1e3
        iteration += 1
        metrics["loss"].append(mean_loss(losses))
        metrics["grad_norm"].append(float(grad_norm) if updated and grad_norm is not None else None)
        metrics["iteration_us"].append(elapsed)
        metrics["peak_bytes"] = max(metrics["peak_bytes"], hooks.peak_bytes())
        if args.metrics_path and args.user_defined_schedule and (held := hooks.census()) is not None:
            metrics["census"].append(kept_once(kept, held))
        log.iteration(iteration, metrics["loss"][-1], metrics["grad_norm"][-1], elapsed)
        if turns is not None:
            turns.after(iteration - 1, last=iteration == args.train_iters)
        if args.eval_interval and iteration % args.eval_interval == 0:
            force_param_sync(model, args)
            metrics["eval_loss"].append(evaluate(args, model, datasets[1]))
        if args.save and args.save_interval and iteration % args.save_interval == 0:
            force_param_sync(model, args)
            checkpoint.save(args.save, iteration, model, optimizer)
            saved = iteration
    log.close()
    to_save = bool(args.save) and saved != iteration
    if to_save or args.metrics_path:  # not otherwise: gathering all parameters takes time, and they may not fit
        force_param_sync(model, args)
    if to_save:
        checkpoint.save(args.save, iteration, model, optimizer)
    metrics["parameter_sha256"] = parameter_hash(model) if args.metrics_path else None
    metrics["host_limit_bytes"] = free_host_memory.limit_bytes()
    metrics["cuda_peak_bytes"] = torch.cuda.max_memory_allocated() if has_cuda() else 0
    return metrics


@torch.no_grad()
def evaluate(args, model, dataset) -> float:
    """Mean loss of ``args.eval_iters`` validation batches; parameters must be whole."""
    for chunk in model:
        chunk.eval()
    iterators = [batches_of(args, dataset) for _ in model]
    losses = [mean_loss(run_schedule(args, model, iterators, forward_only=True)) for _ in range(args.eval_iters)]
    for chunk in model:
        chunk.train()
    return sum(losses) / len(losses)


def save_metrics(args, metrics: dict) -> None:
    """Rank 0 writes the metrics of all ranks. Collective."""
    everybody = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, metrics)
    if dist.get_rank() == 0 and args.metrics_path:
        merged = dict(everybody[0])
        merged["iteration_us"] = [max(times) for times in zip(*(m["iteration_us"] for m in everybody))]
        merged["peak_bytes"] = [m["peak_bytes"] for m in everybody] if args.user_defined_schedule else []
        total = lambda held: sum(held["device_bytes"].values())
        merged["census"] = [max(m["census"], key=total) for m in everybody if m["census"]]
        merged["cuda_peak_bytes"] = [m["cuda_peak_bytes"] for m in everybody] if has_cuda() else []
        merged["parameter_sha256"] = [m["parameter_sha256"] for m in everybody]
        json_files.save(args.metrics_path, merged, indent=1)


def main() -> int:
    args = parse_args()
    gpt_arguments.check(args, world_size=int(os.environ.get("WORLD_SIZE", 1)))
    corpus.check(args.data_path, args.seq_length, args.vocab_size)
    if args.metrics_path and int(os.environ.get("RANK", 0)) == 0:
        json_files.check_writable(args.metrics_path)
    hooks.configure(
        args.user_defined_schedule,
        args.user_defined_schedule_trace,
        parallel=gpt_arguments.parallel_of(args),
        check=args.user_defined_schedule_check,
        delay=args.delayed_parameter_update,
        nvme_path=args.user_defined_schedule_nvme_path,
    )
    initialize(args)
    model, optimizer, config = build_model_and_optimizer(args)
    if args.save:
        checkpoint.claim(args.save)
    metrics = train(args, model, optimizer, config, build_datasets(args))
    hooks.finish(read_later=False)
    save_metrics(args, metrics)  # last: a run with a metrics file is complete
    dist.destroy_process_group()
    return 0


def run() -> NoReturn:
    """Run :func:`main`, then exit at once, because threads of collectives may still wait for a rank that has ended."""
    try:
        code = main()
    except Exception as error:
        if one_line_end.says_all(error):
            one_line_end.end(error)
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    run()
