"""Program: one rank saves a checkpoint and loads it in a new model; prints what that took, as JSON.

``python checkpoint_memory.py FOLDER nvme|memory``: where optimizer states rest. The figures are bytes: of all states,
of those of the largest group, and by how much memory that the system cannot take back (neither pages of files nor what
is not touched) grew while states were saved, loaded, and put where they rest.
"""

import json
import sys
import threading
import time
from pathlib import Path

import torch
from msgspec.structs import replace
from parity_worker import pretrain_gpt_hybrid
from random_rows import Rows

from megatron_ext.megatron import describe_model, ignored_options
from megatron_ext.planner.stock import stock_schedule
from megatron_ext.schedule import user_defined_schedule as schedule_file
from megatron_ext.schedule import validate
from megatron_ext.schedule.group_facts import largest_region
from megatron_ext.schedule.user_defined_schedule import StateSlots
from megatron_ext.workload.bucket_rules import layer_buckets
from megatron_ext.workload.state_layout import region_bytes

MODEL = "--num-layers 12 --hidden-size 256 --num-attention-heads 4 --seq-length 8 --vocab-size 128 --bf16".split()
MODEL += ["--untie-embeddings-and-output-weights", "--micro-batch-size", "1", "--global-batch-size", "1"]


def kept_bytes() -> int:
    with open("/proc/self/status") as status:
        return sum(int(line.split()[1]) << 10 for line in status if line.startswith(("RssAnon", "RssShmem")))


class Growth:
    """In a with statement: the most by which kept memory has grown, in ``bytes``."""

    def __enter__(self):
        self.before = self.most = kept_bytes()
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self.look)
        self.thread.start()
        return self

    def look(self) -> None:
        while not self.ended.wait(0.001):
            self.most = max(self.most, kept_bytes())

    def __exit__(self, *_) -> None:
        self.ended.set()
        self.thread.join()
        self.bytes = max(self.most, kept_bytes()) - self.before


def write_schedule(path: Path, rest: str):
    """A schedule for the model, each layer a group; it and, by group, the bytes of its states."""
    work = describe_model.describe_options(ignored_options.parse([*MODEL, "--data-parallel-size", "1"]))
    schedule = stock_schedule(work, layer_buckets)
    numels = {parameter.name: parameter.numel for chunk in work.chunks for parameter in chunk.parameters}
    sizes = [sum(region_bytes(numels[name], 2) for name in group.parameters) for group in schedule.groups]
    if rest == "nvme":
        slots = StateSlots(slots=2, slot_bytes=max(largest_region(schedule.groups[i], work) for i in range(len(sizes))))
        groups = tuple(replace(group, states_rest="nvme") for group in schedule.groups)
        schedule = replace(schedule, groups=groups, state_slots=slots)
    schedule_file.save(path, validate.validate(schedule))
    return schedule, sizes


def main(folder: Path, rest: str) -> dict:
    example, drive = pretrain_gpt_hybrid, folder / "drive"
    drive.mkdir()
    schedule, sizes = write_schedule(folder / "s.json", rest)
    sys.argv = ["memory", "--data-path", "none", *MODEL, "--optimizer-cpu-offload", "--log-interval", "1000"]
    sys.argv += ["--user-defined-schedule", str(folder / "s.json"), "--user-defined-schedule-nvme-path", str(drive)]
    args = example.parse_args()
    example.gpt_arguments.check(args, world_size=1)
    example.initialize(args)
    found = {"states": sum(sizes), "group": max(sizes)}
    found["slots"] = schedule.state_slots.slots * schedule.state_slots.slot_bytes if schedule.state_slots else 0
    losses = []
    rows = Rows(args)
    for part in ("save", "load"):
        example.hooks.configure(args.user_defined_schedule, nvme_path=args.user_defined_schedule_nvme_path)
        model, optimizer, config = example.build_model_and_optimizer(args)
        args.iteration = 0
        if part == "load":
            with Growth() as loading:
                args.iteration = example.checkpoint.load(folder / "saved", model, optimizer)
        with Growth() as putting:
            example.hooks.on_train_setup(args, model, optimizer, config)
        for iteration in range(args.iteration, 3):
            for chunk in model:
                chunk.zero_grad_buffer()
            optimizer.zero_grad()
            iterators = [example.batches_of(args, rows, iteration) for _ in model]
            losses.append(example.mean_loss(example.run_schedule(args, model, iterators)))
            optimizer.step()
            if iteration == 0:
                example.force_param_sync(model, args)
                with Growth() as saving:
                    example.checkpoint.save(folder / "saved", 1, model, optimizer)
        example.hooks.finish()
        if part == "save":
            found["saving"], before = saving.bytes, [p.detach().clone() for c in model for p in c.parameters()]
        else:
            found |= {"loading": loading.bytes, "putting": putting.bytes}
            now = [p.detach() for c in model for p in c.parameters()]
            found["equal"] = losses[1:3] == losses[3:] and all(map(torch.equal, before, now))
        del model, optimizer, config
    return found | {"left": [path.name for path in drive.iterdir()]}


if __name__ == "__main__":
    start = time.process_time()
    print(json.dumps(main(Path(sys.argv[1]), sys.argv[2]) | {"seconds": time.process_time() - start}))
