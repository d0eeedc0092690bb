"""Program: give every parameter of a small model a bucket of its own, in one process, by ``megatron_ext``; print what
Megatron's buffer says of its sizes, as JSON."""

import json

from megatron_ext.megatron import cpu_compat

cpu_compat.install()

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.transformer import TransformerConfig

from megatron_ext.megatron.buckets import lay_out
from megatron_ext.schedule.user_defined_schedule import Group


def main() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    module = torch.nn.Sequential(*(torch.nn.Linear(3, 3) for _ in range(4)))
    values = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
    config = TransformerConfig(num_layers=1, hidden_size=4, num_attention_heads=1)
    overlap = {"overlap_grad_reduce": True, "overlap_param_gather": True, "use_distributed_optimizer": True}
    ddp = DistributedDataParallel(config, DistributedDataParallelConfig(**overlap), module)
    (buffer,) = ddp.buffers
    before = buffer.numel
    groups = {
        i: Group(pp_rank=0, model_chunk_id=0, parameters=(name,), bytes=0, ranks=1) for i, name in enumerate(values)
    }
    lay_out(ddp, groups, file="schedule.json")
    kept = all(torch.equal(parameter, values[name]) for name, parameter in module.named_parameters())
    print(json.dumps({"before": before, "after": buffer.numel, "buckets": len(buffer.buckets), "kept": kept}))


if __name__ == "__main__":
    main()
