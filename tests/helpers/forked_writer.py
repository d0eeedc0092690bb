"""Program: let Megatron's writer of checkpoints save a page-locked tensor of threes to FOLDER, and load it; exit code 0
if it is the same."""

import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from megatron.core.dist_checkpointing.strategies import filesystem_async
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemReader

from megatron_ext.runtime.page_locked import page_locked


class Device:
    """Page-locks nothing."""

    def pin(self, tensor) -> None: ...

    def unpin(self, address) -> None: ...


def main(folder: str) -> int:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    saved = page_locked(1000, torch.float32, Device()).fill_(3)
    filesystem_async._process_memory = lambda: 0  # it needs psutil, without which the writer waits for ever
    writer, planner = filesystem_async.FileSystemWriterAsync(folder, thread_count=1), DefaultSavePlanner()
    planner.set_up_planner({"saved": saved}, is_coordinator=True)
    writer.set_up_storage_writer(True)
    plans, metadata = planner.create_global_plan([writer.prepare_local_plan(planner.create_local_plan())])
    writer.prepare_write_data(planner.finish_plan(writer.prepare_global_plan(plans)[0]), planner)
    write, _, (rank, _, *others) = writer.get_save_function_and_args()
    write(rank, writer.write_buckets, *others)
    writer.finish(metadata, [writer.retrieve_write_results()])
    loaded = {"saved": torch.zeros(1000)}
    checkpoint.load(loaded, storage_reader=FileSystemReader(folder), no_dist=True)
    dist.destroy_process_group()
    return int(not loaded["saved"].eq(3).all())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
