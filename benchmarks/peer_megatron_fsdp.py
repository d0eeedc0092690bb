"""Megatron-FSDP (of the megatron-core release) training the main job's GPT; one rank. Part of peers.py.

    peer_megatron_fsdp.py optim_grads_params OPTIONS

It asks for CUDA devices by default; handed the CPU it trains there. Its gathers are asynchronous
collectives, so they overlap without streams too.
"""

from peer_training import Peer, job, main  # isort: skip  first: it makes Megatron work without a GPU

import model_and_optimizer
import torch
from megatron.core.distributed import DistributedDataParallelConfig, finalize_model_grads
from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.transformer.module import Float16Module


class MegatronFsdp(Peer):
    ways = ("optim_grads_params",)

    def __init__(self, args, way, config, chunks):
        super().__init__(args, way, config, chunks)
        sharding = DistributedDataParallelConfig(
            use_megatron_fsdp=True,
            data_parallel_sharding_strategy=way,
            use_distributed_optimizer=True,
            overlap_grad_reduce=True,
            overlap_param_gather=True,
            grad_reduce_in_fp32=args.bf16,
            gradient_reduce_div_fusion=False,  # gloo has no premultiplied sum
            # Twice a layer. Its default is at least 1e9 elements (a maximum where "cap" is written), which holds a
            # small model whole.
            suggested_communication_unit_size=2 * sum(p.numel() for p in chunks[0].decoder.layers[0].parameters()),
        )
        whole = Float16Module(config, chunks[0]) if args.bf16 else chunks[0]
        self.model = [FullyShardedDataParallel(config, sharding, whole, device=torch.device("cpu"))]
        adam = model_and_optimizer.adam_config(
            args, config.params_dtype, bf16=args.bf16, fp16=False, overlap_param_gather=True
        )
        self.optimizer = get_megatron_optimizer(adam, self.model)
        config.no_sync_func, config.finalize_model_grads_func = self.model[0].no_sync, finalize_model_grads
        config.grad_scale_func = self.optimizer.scale_loss

    def forward_backward(self, iterator):
        self.model[0].zero_grad_buffer()
        self.optimizer.zero_grad()
        return job.run_schedule(self.args, self.model, [iterator])

    def step(self):
        _, norm, _ = self.optimizer.step()
        return float(norm)


if __name__ == "__main__":
    main(MegatronFsdp)
