"""torch's FSDP2 (fully_shard), and Megatron-FSDP of the megatron-core release, training the main job's GPT; one rank.
Part of peers.py.

    peer_fsdp.py WAY OPTIONS      WAY: reshard, every, offload; optim_grads_params

FSDP2: every transformer layer is a unit, and the root holds the rest, as torch's examples do it. ``reshard`` keeps
whole gradients and reduces them once an iteration, as Megatron does. ``every`` reduces them behind every backward, and
``offload`` does so with CPUOffloadPolicy. With --bf16, shards and optimizer are float32 and gradients are reduced in
it, as in Megatron.

[Note: FSDP2 without streams]
FSDP2 lets gathers overlap by CUDA streams. Without a GPU there are none, and its gathers would
block the training thread. It has a second way, asynchronous collectives with explicit prefetch,
which overlaps on the processor too: that one is used, with the next layer prefetched in forward
and in backward. Its reduce-scatters have no such way; they block, once an iteration.

Megatron-FSDP (``optim_grads_params``) asks for CUDA devices by default; handed the CPU it trains there. Its gathers are
asynchronous collectives, so they overlap without streams too.
"""

from peer_training import Peer, adam, batch_loss, data_parallel_mesh, job, main, states_of  # isort: skip  first: it makes Megatron work without a GPU

import model_and_optimizer
import torch
from megatron.core.distributed import DistributedDataParallelConfig, finalize_model_grads
from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.transformer.module import Float16Module
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor


def shard(chunk: nn.Module, mesh, *, offload: bool = False, bf16: bool = False) -> None:
    """Shard a GPT chunk layer by layer, and let each layer prefetch the next."""
    policy = CPUOffloadPolicy(pin_memory=False) if offload else OffloadPolicy()
    precision = (
        MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if bf16 else MixedPrecisionPolicy()
    )
    layers = list(chunk.decoder.layers)
    for module in (*layers, chunk):
        fully_shard(module, mesh=mesh, reshard_after_forward=True, offload_policy=policy, mp_policy=precision)
    if hasattr(chunk, "_set_unshard_async_op"):
        chunk._set_unshard_async_op(True)  # [Note: FSDP2 without streams]
    for earlier, later in zip(layers, layers[1:]):
        earlier.set_modules_to_forward_prefetch([later])
        later.set_modules_to_backward_prefetch([earlier])


def full(norm) -> float:
    """A norm that may be spread over ranks."""
    return (norm.full_tensor() if isinstance(norm, DTensor) else norm).item()


class Fsdp2(Peer):
    def __init__(self, args, way, config, chunks):
        super().__init__(args, way, config, chunks)
        (self.model,) = chunks
        if args.bf16:
            self.model.float()  # the values that bfloat16 has, as Megatron's float32 copies
        shard(self.model, data_parallel_mesh(), offload=way == "offload", bf16=args.bf16)
        assert isinstance(self.model, FSDPModule)
        self.optimizer = adam(args, self.model.named_parameters())

    def on_host(self):
        return states_of(self.optimizer) if self.way == "offload" else ()

    def forward_backward(self, iterator):
        losses, count = [], self.args.num_microbatches
        for number in range(count):
            last = number == count - 1
            if self.way == "reshard":
                self.model.set_requires_gradient_sync(last)
            self.model.set_is_last_backward(last)
            loss = batch_loss(self.model, next(iterator))
            (loss / count).backward()
            losses.append({"lm loss": loss.detach()})
        return losses

    def step(self):
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.args.clip_grad, foreach=True)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return full(norm)


class MegatronFsdp(Peer):
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
        optimizer = model_and_optimizer.adam_config(
            args, config.params_dtype, bf16=args.bf16, fp16=False, overlap_param_gather=True
        )
        self.optimizer = get_megatron_optimizer(optimizer, self.model)
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
    main({"reshard": Fsdp2, "every": Fsdp2, "offload": Fsdp2, "optim_grads_params": MegatronFsdp})
