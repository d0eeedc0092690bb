"""DeepSpeed ZeRO-3 training the main job's GPT; one rank. Part of peers.py.

    peer_deepspeed.py WAY OPTIONS      WAY: zero3, offload, infinity

[Note: how DeepSpeed is set]
As tests/helpers/deepspeed_zero3.py says.

``infinity`` is ZeRO-Infinity: parameters and optimizer states rest on the drive at PEER_NVME, read and written by
DeepSpeed's own asynchronous I/O and stepped by its own Adam; both are built by g++, the first with libaio-dev (Debian).
Buffers are as many as reading and writing ahead need, and as large as the largest parameter.
"""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "helpers"))
os.environ["DS_ACCELERATOR"] = "cpu"
os.environ.setdefault("DS_BUILD_OPS", "0")

from peer_training import Peer, adam, batch_loss, main, states_of  # noqa: I001  first: it makes Megatron work without a GPU

import deepspeed
import deepspeed_zero3

AIO = {
    "block_size": 1 << 20,
    "queue_depth": 32,
    "intra_op_parallelism": 1,
    "single_submit": False,
    "overlap_events": True,
}


def on_drive(largest: int) -> dict:
    """ZeRO-Infinity's settings for a model whose largest parameter has ``largest`` elements."""
    where = {"device": "nvme", "nvme_path": os.environ["PEER_NVME"], "pin_memory": False}
    return {
        "offload_param": where | {"buffer_count": 5, "buffer_size": largest, "max_in_cpu": 0},
        "offload_optimizer": where | {"buffer_count": 12, "pipeline_read": True, "pipeline_write": True},
        "sub_group_size": largest,
    }


class DeepSpeed(Peer):
    ways = ("zero3", "offload", "infinity")

    def __init__(self, args, way, config, chunks):
        super().__init__(args, way, config, chunks)
        (model,) = chunks
        deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)
        deepspeed_zero3.pass_hidden_states_by_position()
        zero = {}
        if way == "offload":  # without DeepSpeedCPUAdam, which must be built: torch's AdamW, as for everybody
            zero = {"offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}}
        if way == "infinity":
            zero = on_drive(max(p.numel() for p in model.parameters()))
        optimizer = adam(args, model.named_parameters())
        if way == "infinity":
            from deepspeed.ops.adam import DeepSpeedCPUAdam  # builds it

            optimizer = DeepSpeedCPUAdam(optimizer.param_groups, lr=args.lr, betas=(0.9, 0.999), eps=1e-8)
        more = {"aio": AIO} if way == "infinity" else {}
        self.engine = deepspeed_zero3.initialize(model, optimizer, args, zero, **more)

    def on_host(self):
        """Shards, gradients and optimizer states of the ``offload`` way, by the names that ZeRO-3 gives them."""
        if self.way != "offload":
            return
        zero = self.engine.optimizer
        yield from states_of(zero.optimizer)
        yield from (p.ds_tensor for p in self.engine.module.parameters() if p.ds_tensor is not None)
        held = (zero.fp32_partitioned_groups_flat, zero.fp16_partitioned_groups_flat, zero.grad_partitions_flat_buffer)
        for one in held:
            yield from (tensor for tensor in (one if isinstance(one, list) else [one]) if tensor is not None)
        yield from getattr(zero, "_DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition", {}).values()
        yield from (p.grad for p in zero.fp32_partitioned_groups_flat if p.grad is not None)

    def forward_backward(self, iterator):
        losses = []
        for number in range(self.args.num_microbatches):
            loss = batch_loss(self.engine, next(iterator))
            self.engine.backward(loss)
            if number < self.args.num_microbatches - 1:
                self.engine.step()  # DeepSpeed counts micro-batches by it
            losses.append({"lm loss": loss.detach()})
        return losses

    def step(self):
        self.engine.step()
        norm = self.engine.get_global_grad_norm()
        return float(norm) if norm is not None else None


if __name__ == "__main__":
    main(DeepSpeed)
