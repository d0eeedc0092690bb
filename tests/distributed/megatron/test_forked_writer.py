"""Before core_v0.17 forked processes write checkpoints of format torch_dist. They do not see page-locked memory."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemReader

from megatron_ext.runtime.page_locked import page_locked


class Device:
    """Page-locks nothing."""

    def pin(self, tensor) -> None: ...

    def unlock(self, address) -> None: ...


@pytest.fixture
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore")
def test_a_parameter_that_fills_its_memory_is_saved(one_rank, tmp_path):
    """Megatron itself copies only parameters that share memory with others."""
    from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

    parameter = page_locked(1000, torch.float32, Device()).fill_(3)
    writer, planner = FileSystemWriterAsync(tmp_path, thread_count=1), DefaultSavePlanner()
    planner.set_up_planner({"parameter": parameter}, is_coordinator=True)
    writer.set_up_storage_writer(True)
    plans, metadata = planner.create_global_plan([writer.prepare_local_plan(planner.create_local_plan())])
    writer.prepare_write_data(planner.finish_plan(writer.prepare_global_plan(plans)[0]), planner)
    write, _, (rank, _, *others) = writer.get_save_function_and_args()
    write(rank, writer.write_buckets, *others)
    writer.finish(metadata, [writer.retrieve_write_results()])
    loaded = {"parameter": torch.zeros(1000)}
    checkpoint.load(loaded, storage_reader=FileSystemReader(tmp_path), no_dist=True)
    assert loaded["parameter"].eq(3).all()
