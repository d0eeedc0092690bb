"""Program: train a small GPT in one process with delayed updates, by a schedule through Megatron and by a loop of plain
PyTorch; print the losses and the parameters' sha256 of both as JSON.

The loop is the rule as it is written: w[t+1] = w[t] - f(gradient at w[t-1]).
"""

import hashlib
import json
import os
import random
import sys
from pathlib import Path

from megatron_ext.megatron import cpu_compat

cpu_compat.install()

import torch
import torch.distributed as dist
from draw_schedule import draw_schedule
from megatron.core import parallel_state

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import pretrain_gpt_hybrid as example
from msgspec.structs import replace
from random_rows import Rows

from megatron_ext.megatron import gpt_arguments, gpt_model
from megatron_ext.megatron.describe_model import describe_chunk
from megatron_ext.schedule import user_defined_schedule as schedule_file
from megatron_ext.schedule.validate import validate
from megatron_ext.workload.optimizer_settings import OptimizerSettings
from megatron_ext.workload.workload import SCHEMA_VERSION, Limits, Workload, check

ITERATIONS = 5


def parse(delay: int):
    sizes = "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 16 --vocab-size 120 --bf16 --lr 1e-2"
    sizes += " --untie-embeddings-and-output-weights --optimizer-cpu-offload --clip-grad 0"
    sizes += " --micro-batch-size 2 --global-batch-size 2"
    options = [*sizes.split(), "--train-iters", str(ITERATIONS), "--delayed-parameter-update", str(delay)]
    sys.argv = ["plain", "--data-path", "none", "--log-interval", "1000", *options]
    args = example.parse_args()
    gpt_arguments.check(args, world_size=1)
    example.set_seeds(args)
    return args


def digest(parameters) -> str:
    data = b"".join(p.detach().contiguous().view(torch.uint8).numpy().tobytes() for p in parameters)
    return hashlib.sha256(data).hexdigest()


def scheduled(folder: Path, delay: int) -> dict:
    args = parse(delay)
    chunk = gpt_model.build_chunks(args, gpt_model.transformer_config(args))[0].bfloat16()
    workload = check(
        Workload(
            schema_version=SCHEMA_VERSION,
            kind="workload",
            parallel=gpt_arguments.parallel_of(args),
            zero_stage=3,
            chunks=(describe_chunk(chunk, 0, 0),),
            p2p_bytes=0,
            limits=Limits(),
        )
    )
    schedule = draw_schedule(random.Random(1), replace(workload, optimizer=OptimizerSettings(on_host=True)), ("cpu",))
    schedule_file.save(folder / "s.json", validate(schedule))
    args = parse(delay)
    args.user_defined_schedule = str(folder / "s.json")
    example.hooks.configure(args.user_defined_schedule, delay=delay)
    model, optimizer, config = example.build_model_and_optimizer(args)
    losses = example.train(args, model, optimizer, config, (Rows(args), None))["loss"]
    example.hooks.finish()
    return {"loss": losses, "parameter_sha256": digest(model[0].parameters())}


def plain(delay: int) -> dict:
    args = parse(delay)
    model = gpt_model.build_chunks(args, gpt_model.transformer_config(args))[0].bfloat16().train()
    named = list(model.named_parameters())
    masters = [parameter.detach().float() for _, parameter in named]
    adam = torch.optim.AdamW(masters, lr=args.lr, weight_decay=args.weight_decay, fused=True)
    batches, losses, waiting = example.batches_of(args, Rows(args)), [], None

    def step(gradients) -> None:
        for master, gradient in zip(masters, gradients):
            master.grad = gradient
        adam.step()
        with torch.no_grad():
            for (_, parameter), master in zip(named, masters):
                parameter.copy_(master)

    for iteration in range(1, ITERATIONS + 1):
        output, loss_func = example.forward_step(batches, model)
        loss, reported = loss_func(output)
        loss.backward()
        losses.append(reported["lm loss"].item())
        gradients = [parameter.grad.float() for _, parameter in named]
        for _, parameter in named:
            parameter.grad = None
        if iteration <= delay:
            step(gradients)
            continue
        if waiting is not None:
            step(waiting)
        waiting = gradients
    if waiting is not None:
        step(waiting)
    return {"loss": losses, "parameter_sha256": digest(model.parameters())}


def main(folder: str, delay: str) -> None:
    random.seed(1)
    os.environ.update(RANK="0", WORLD_SIZE="1")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    print(json.dumps({"scheduled": scheduled(Path(folder), int(delay)), "plain": plain(int(delay))}))


if __name__ == "__main__":
    main(*sys.argv[1:])
