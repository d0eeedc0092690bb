"""Program: print the buckets that Megatron makes of a model in one process, as JSON: names of parameters by bucket."""

import json
import sys

from megatron_ext.megatron import cpu_compat

cpu_compat.install()

import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

from megatron_ext.megatron import gpt_model
from megatron_ext.megatron.ignored_options import parse


def main(bucket_size: int, options: list[str]) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    args = parse(options)
    config = gpt_model.transformer_config(args)
    (chunk,) = gpt_model.build_chunks(args, config)
    names = {parameter: name for name, parameter in chunk.named_parameters()}
    ddp_config = DistributedDataParallelConfig(
        overlap_grad_reduce=True, use_distributed_optimizer=True, bucket_size=bucket_size
    )
    model = DistributedDataParallel(config, ddp_config, chunk)
    buckets = [bucket for buffer in model.buffers for bucket in buffer.buckets]
    print(json.dumps([sorted(names[parameter] for parameter in bucket.params) for bucket in buckets]))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
