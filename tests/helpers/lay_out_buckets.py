"""Program: give every parameter of a small model a bucket of its own, in one process, by ``megatron_ext``; print what
Megatron's buffers say of their sizes, and why other groups are refused, as JSON. The last layer is one of experts."""

import json

from megatron_ext.megatron import cpu_compat

cpu_compat.install()

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.transformer import TransformerConfig

from megatron_ext.formats.errors import InputError
from megatron_ext.megatron.buckets import lay_out_buckets
from megatron_ext.schedule.user_defined_schedule import Group


def main() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    module = torch.nn.Sequential(*(torch.nn.Linear(3, 3) for _ in range(4)))
    for parameter in module[-1].parameters():
        setattr(parameter, "allreduce", False)  # noqa: B010 - Megatron's mark of experts
    values = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
    config = TransformerConfig(num_layers=1, hidden_size=4, num_attention_heads=1)
    overlap = {"overlap_grad_reduce": True, "overlap_param_gather": True, "use_distributed_optimizer": True}
    ddp = DistributedDataParallel(config, DistributedDataParallelConfig(**overlap), module)
    (buffer,), (experts,) = ddp.buffers, ddp.expert_parallel_buffers
    before = buffer.numel + experts.numel
    single = [(name,) for name in values]
    refused = [
        why_refused(ddp, groups_of(names, ranks))
        for names, ranks in ((single[:6], 1), ([*single[:5], sum(single[5:7], ()), single[7]], 1), (single, 2))
    ]
    lay_out_buckets(ddp, groups_of(single), file="schedule.json")
    kept = all(torch.equal(parameter, values[name]) for name, parameter in module.named_parameters())
    buckets = [[len(group.buckets) for group in own] for own in (ddp.bucket_groups, ddp.expert_parallel_bucket_groups)]
    after = buffer.numel + experts.numel
    print(json.dumps({"before": before, "after": after, "buckets": buckets, "kept": kept, "refused": refused}))


def groups_of(names: list[tuple[str, ...]], expert_ranks: int = 1) -> dict[int, Group]:
    ranks = [expert_ranks if any(name.startswith("3.") for name in own) else 1 for own in names]
    return {
        index: Group(pp_rank=0, model_chunk_id=0, parameters=own, bytes=0, ranks=among)
        for index, (own, among) in enumerate(zip(names, ranks))
    }


def why_refused(ddp, groups: dict[int, Group]) -> str:
    try:
        lay_out_buckets(ddp, groups, file="schedule.json")
    except InputError as error:
        return str(error)
    return ""


if __name__ == "__main__":
    main()
