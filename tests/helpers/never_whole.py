"""Program of one rank: trains a model whose parameters never fit whole; prints what came of it, as JSON, on rank 0.

``python never_whole.py FOLDER WHERE...``: all rests on the ``device``, or the optimizer, gradients and shards on the
``host``, with the states of every second group on the drive; ``nvme``: the same, but for shards on the device;
``optimizer``: gradients and shards in host memory, and the optimizer on the device.
Trains by Megatron's own gathers first, then by a schedule of one layer at a time, with an evaluation, a checkpoint and
a hash, and then goes on from the checkpoint; last without a limit. The figures are bytes of device memory, see
device_bytes.py.
"""

import gc
import json
import os
import sys
from pathlib import Path

import torch.distributed as dist
from device_bytes import DeviceBytes, phases_of
from draw_schedule import states_on_drive, with_own_peak
from msgspec.structs import replace
from parity_worker import pretrain_gpt_hybrid, train

from megatron_ext.megatron import describe_model, gpt_arguments
from megatron_ext.megatron.lifecycle import STOCK_GATHER
from megatron_ext.planner.baselines import all_gpu
from megatron_ext.planner.reroute import by_cpu_shard, with_host_shards
from megatron_ext.schedule import user_defined_schedule as schedule_file
from megatron_ext.schedule import validate
from megatron_ext.workload.optimizer_settings import OptimizerSettings
from megatron_ext.workload.workload import Limits

MODEL = "--num-layers 10 --hidden-size 64 --num-attention-heads 4 --seq-length 8 --vocab-size 128 --bf16".split()
MODEL += ["--untie-embeddings-and-output-weights", "--micro-batch-size", "1", "--global-batch-size", "2"]
TRAINING = ["--eval-interval", "2", "--eval-iters", "1", "--log-interval", "1000", "--lr", "1e-2"]


ON_HOST = ("host", "nvme")
"""Where the optimizer steps on the host."""


def write_schedule(path: Path, where: str) -> dict:
    """A schedule that gathers layer by layer, with its own peak as the limit; and its figures."""
    parser = gpt_arguments.add_plan_arguments(gpt_arguments.add_gpt_arguments(gpt_arguments.OneLineParser()))
    args = parser.parse_args([*MODEL, "--data-parallel-size", "2"])
    gpt_arguments.check(args)
    work = describe_model.describe_options(args)
    work = replace(work, zero_stage=3, limits=Limits(), optimizer=OptimizerSettings(on_host=where in ON_HOST))
    schedule = all_gpu(work)
    if where != "device":
        groups = tuple(replace(group, gradients="host") for group in schedule.groups)
        schedule = replace(schedule, groups=groups)
        schedule = with_host_shards(by_cpu_shard(schedule), work) if where != "nvme" else schedule
    if where in ON_HOST:
        schedule = states_on_drive(schedule, work, list(range(1, len(schedule.groups), 2)), slots=2)
    schedule = with_own_peak(schedule, work)
    schedule_file.save(path, schedule)
    planned, memory = schedule.limits.device_bytes, schedule.predicted.memory[0]
    whole = sum(group.bytes for group in schedule.groups)
    return {"planned": planned, "whole": whole, "activations": memory.device_bytes.get("activations", 0)}


def train_all(example, folder: Path, where: str) -> dict:
    """What came of each run, and the most bytes by phase, on this rank."""
    path = str(folder / f"{where}.json")
    options = [*MODEL, *TRAINING, *(["--optimizer-cpu-offload", "--init-by-name"] if where in ON_HOST else [])]
    options += ["--user-defined-schedule-nvme-path", str(folder)]
    checkpoints = str(folder / f"{where}.checkpoints")
    runs = {"stock": train(example, options, path, {STOCK_GATHER: "1"}, 4)}
    os.environ.pop(STOCK_GATHER)
    with DeviceBytes(phases_of(example)) as counted:
        runs["scheduled"] = train(example, [*options, "--save", checkpoints], path, {"MEGATRON_EXT_DEBUG": "1"}, 3)
    with DeviceBytes(phases_of(example)) as loaded:
        runs["loaded"] = train(example, [*options, "--load", checkpoints], path, {}, 4)
    with DeviceBytes(phases_of(example)) as unlimited:  # all whole before the first iteration
        train(example, options, str(folder / f"{where}.unlimited.json"), {}, 1)
    gc.collect()
    names = ("loss", "eval_loss", "grad_norm", "parameter_sha256")
    mine = {name: {key: found[key] for key in names} for name, found in runs.items()}
    census = [held["device_bytes"] for name in ("scheduled", "loaded") for held in runs[name]["census"]]
    mine["census"] = max(sum(size for kind, size in held.items() if kind != "activations") for held in census)
    mine |= {"left": [run.live for run in (counted, loaded, unlimited)]}
    return mine | {"peaks": counted.peaks, "loading": loaded.peaks, "unlimited": unlimited.peaks}


def main(folder: Path, places: list[str]) -> None:
    example = pretrain_gpt_hybrid
    figures = {}
    if int(os.environ["RANK"]) == 0:  # before there are process groups: it makes some of its own
        for where in places:
            figures[where] = write_schedule(folder / f"{where}.json", where)
            schedule = validate.load(folder / f"{where}.json")
            unlimited = replace(schedule, limits=replace(schedule.limits, device_bytes=None))
            schedule_file.save(folder / f"{where}.unlimited.json", unlimited)
    sys.argv = ["never_whole", "--data-path", "none", *MODEL]
    args = example.parse_args()
    example.gpt_arguments.check(args, world_size=2)
    example.initialize(args)
    dist.barrier()
    ranks = [None, None]
    dist.all_gather_object(ranks, {where: train_all(example, folder, where) for where in places})
    if dist.get_rank() == 0:
        print(json.dumps({"figures": figures, "ranks": ranks}), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
