"""Program of one rank: the host memory that runs take, beside what they say before training that they will; JSON.

``python taken_memory.py FOLDER CASE...``. A case: optimizer states rest in ``memory`` or on the drive (``nvme``); and,
after a comma, where parameters never fit whole, whether shards rest on the ``host`` or on the ``device``. Bytes that a
run says, and by which memory that the system cannot take back grew from there to where a checkpoint is written, at
most; of one that begins anew, and of one that begins from its checkpoint. All memory is the host's here. What the
device holds throughout training is there before. What comes and goes there, by the memory bill, is a figure of its own.
"""

import json
import sys
from pathlib import Path
from unittest import mock

import torch
from checkpoint_memory import Growth
from draw_schedule import states_on_drive, with_own_peak
from msgspec.structs import replace
from parity_worker import pretrain_gpt_hybrid, train

from megatron_ext.megatron import describe_model, ignored_options
from megatron_ext.planner.baselines import all_gpu
from megatron_ext.planner.reroute import by_cpu_shard, with_host_shards
from megatron_ext.planner.stock import stock_schedule
from megatron_ext.schedule import memory_bill, validate
from megatron_ext.schedule import user_defined_schedule as schedule_file
from megatron_ext.workload.bucket_rules import layer_buckets
from megatron_ext.workload.optimizer_settings import OptimizerSettings

MODEL = "--num-layers 12 --hidden-size 256 --num-attention-heads 4 --seq-length 8 --vocab-size 128 --bf16".split()
MODEL += ["--untie-embeddings-and-output-weights", "--micro-batch-size", "1", "--global-batch-size", "1"]


def write_schedule(path: Path, case: str) -> dict[str, int]:
    """A schedule for the model, each layer a group; bytes of parameters, and of what comes and goes on the device."""
    work = describe_model.describe_options(ignored_options.parse([*MODEL, "--data-parallel-size", "1"]))
    rest, _, late = case.partition(",")
    work = replace(work, zero_stage=3 if late else 1, optimizer=OptimizerSettings(on_host=True))
    schedule = all_gpu(work) if late else stock_schedule(work, layer_buckets)
    if late:
        schedule = replace(schedule, groups=tuple(replace(group, gradients="host") for group in schedule.groups))
    if late == "host":
        schedule = with_host_shards(by_cpu_shard(schedule), work)
    if rest == "nvme":
        schedule = states_on_drive(schedule, work, [*range(len(schedule.groups))], slots=2)
    schedule_file.save(path, with_own_peak(schedule, work) if late else validate.validate(schedule))
    held = memory_bill.memory_bill(schedule, work)[0].memory.device_bytes if late else {}
    comes = sum(held.get(kind, 0) for kind in ("whole_parameters", "gradients", "activations"))
    return {"whole": sum(group.bytes for group in schedule.groups), "comes": comes}


def measured(example, path: Path, iterations: int, *options: str) -> dict[str, int]:
    """The figures of one run, with a checkpoint at its end."""
    found, growth, host_bytes_taken, save = {}, Growth(), memory_bill.host_bytes_taken, torch.save

    def begin(*given, **named):
        found["said"] = (taken := host_bytes_taken(*given, **named))[0]
        growth.__enter__()
        return taken

    def end(*given):
        if "took" not in found:  # the first file has the parameters
            growth.__exit__()
            found["took"] = growth.bytes
        return save(*given)

    with mock.patch.object(memory_bill, "host_bytes_taken", begin), mock.patch.object(torch, "save", end):
        train(example, [*MODEL, "--optimizer-cpu-offload", *options], str(path), {}, iterations)
    return found


def main(folder: Path, cases: list[str]) -> None:
    example, found = pretrain_gpt_hybrid, {}
    sizes = {case: write_schedule(folder / f"{case}.json", case) for case in cases}
    sys.argv = ["taken", "--data-path", "none", *MODEL]
    args = example.parse_args()
    example.gpt_arguments.check(args, world_size=1)
    example.initialize(args)
    for case in (cases[0], *cases):  # the first training imports for megabytes
        path, saved = folder / f"{case}.json", str(folder / case)
        options = ["--user-defined-schedule-nvme-path", str(folder), "--save", saved]
        anew = measured(example, path, 1, *options)
        found[case] = {**sizes[case], "anew": anew}
        found[case]["loaded"] = measured(example, path, 2, *options, "--load", saved)
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
