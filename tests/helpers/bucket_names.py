"""Program: print what Megatron makes of a model in one process, as JSON: names of parameters by bucket, and when they
are gathered.

``synchronous`` are the buckets that are gathered without ``--overlap-param-gather``, all before the forward;
``overlapped`` those with it, as ``["gather", bucket]`` among ``["module", its buckets]``, of every module that begins.
"""

import json
import sys

from megatron_ext.megatron import cpu_compat

cpu_compat.install()

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, param_and_grad_buffer

from megatron_ext.megatron import gpt_model
from megatron_ext.megatron.ignored_options import parse


def wrapped(args, bucket_size: int, events: list, *, overlap: bool):
    """The model, its buckets, and a DDP whose modules and gathers are added to ``events``."""
    config = gpt_model.transformer_config(args)
    (chunk,) = gpt_model.build_chunks(args, config)
    bucket_of: dict = {}

    def begins(module, _):
        held = sorted({bucket_of[parameter] for parameter in module.parameters(recurse=False)})
        if held:
            events.append(["module", held])

    for module in chunk.modules():
        module.register_forward_pre_hook(begins)  # before Megatron's own hook
    ddp_config = DistributedDataParallelConfig(
        overlap_grad_reduce=True, use_distributed_optimizer=True, bucket_size=bucket_size, overlap_param_gather=overlap
    )
    model = DistributedDataParallel(config, ddp_config, chunk)
    buckets = [bucket for buffer in model.buffers for bucket in buffer.buckets]
    bucket_of.update((parameter, index) for index, bucket in enumerate(buckets) for parameter in bucket.params)
    place = {bucket.param_data.data_ptr(): index for index, bucket in enumerate(buckets)}

    def gather(whole, shard, **options):
        events.append(["gather", place[whole.data_ptr()]])
        return GATHER(whole, shard, **options)

    param_and_grad_buffer.dist_all_gather_func = gather
    return chunk, buckets, model


GATHER = param_and_grad_buffer.dist_all_gather_func


def main(bucket_size: int, options: list[str]) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    args, synchronous, overlapped = parse(options), [], []
    chunk, buckets, model = wrapped(args, bucket_size, synchronous, overlap=False)
    names = {parameter: name for name, parameter in chunk.named_parameters()}
    by_bucket = [sorted(names[parameter] for parameter in bucket.params) for bucket in buckets]
    model.start_param_sync()  # as DistributedOptimizer.step_with_ready_grads does
    _, _, model = wrapped(args, bucket_size, overlapped, overlap=True)
    tokens = torch.arange(args.seq_length)[None]
    model(tokens % 8, tokens, None, labels=tokens % 8)
    print(json.dumps({"buckets": by_bucket, "synchronous": synchronous, "overlapped": overlapped}))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
