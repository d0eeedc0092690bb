"""torch FSDP2 (fully_shard) training the main job's GPT; one rank. Part of peers.py.

    peer_fsdp2.py WAY OPTIONS      WAY: whole, reshard, every, offload

Every transformer layer is a unit, and the root holds the rest, as torch's examples do it.
``whole`` keeps parameters whole from their first use to the last micro-batch's backward, ``reshard`` frees them behind
each use; both keep whole gradients and reduce them once an iteration, as Megatron does. ``every`` reduces them behind
every backward, and ``offload`` does so with CPUOffloadPolicy. With --bf16, shards and optimizer are float32 and
gradients are reduced in it, as in Megatron.

[Note: FSDP2 without streams]
FSDP2 lets gathers overlap by CUDA streams. Without a GPU there are none, and its gathers would
block the training thread. It has a second way, asynchronous collectives with explicit prefetch,
which overlaps on the processor too: that one is used, with the next layer prefetched in forward
and in backward. Its reduce-scatters have no such way; they block, once an iteration.
"""

import torch
from peer_training import Peer, adam, batch_loss, data_parallel_mesh, main, states_of
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor


def shard(chunk: nn.Module, mesh, *, reshard_after_forward: bool, offload: bool = False, bf16: bool = False) -> None:
    """Shard a GPT chunk layer by layer, and let each layer prefetch the next."""
    policy = CPUOffloadPolicy(pin_memory=False) if offload else OffloadPolicy()
    precision = (
        MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if bf16 else MixedPrecisionPolicy()
    )
    layers = list(chunk.decoder.layers)
    for module in (*layers, chunk):
        fully_shard(
            module, mesh=mesh, reshard_after_forward=reshard_after_forward, offload_policy=policy, mp_policy=precision
        )
    if hasattr(chunk, "_set_unshard_async_op"):
        chunk._set_unshard_async_op(True)  # [Note: FSDP2 without streams]
    for earlier, later in zip(layers, layers[1:]):
        earlier.set_modules_to_forward_prefetch([later])
        later.set_modules_to_backward_prefetch([earlier])


def full(norm) -> float:
    """A norm that may be spread over ranks."""
    return (norm.full_tensor() if isinstance(norm, DTensor) else norm).item()


class Fsdp2(Peer):
    ways = ("whole", "reshard", "every", "offload")

    def __init__(self, args, way, config, chunks):
        super().__init__(args, way, config, chunks)
        (self.model,) = chunks
        if args.bf16:
            self.model.float()  # the values that bfloat16 has, as Megatron's float32 copies
        shard(
            self.model,
            data_parallel_mesh(),
            reshard_after_forward=way != "whole",
            offload=way == "offload",
            bf16=args.bf16,
        )
        assert isinstance(self.model, FSDPModule)
        self.optimizer = adam(args, self.model.named_parameters())

    def on_host(self):
        return states_of(self.optimizer) if self.way == "offload" else ()

    def forward_backward(self, iterator):
        losses, count = [], self.args.num_microbatches
        for number in range(count):
            last = number == count - 1
            if self.way in ("whole", "reshard"):
                self.model.set_requires_gradient_sync(last)
            self.model.set_is_last_backward(last)
            if self.way == "whole":
                self.model.set_reshard_after_backward(last)
            loss = batch_loss(self.model, next(iterator))
            (loss / count).backward()
            losses.append({"lm loss": loss.detach()})
        return losses

    def step(self):
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.args.clip_grad, foreach=True)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return full(norm)


if __name__ == "__main__":
    main(Fsdp2)
