"""DeepSpeed ZeRO-3 training the main job's GPT; one rank. Part of peers.py.

    peer_deepspeed.py WAY OPTIONS      WAY: zero3, offload

[Note: how DeepSpeed is set]
As tests/helpers/deepspeed_zero3.py says.
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


class DeepSpeed(Peer):
    def __init__(self, args, way, config, chunks):
        super().__init__(args, way, config, chunks)
        (model,) = chunks
        deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)
        deepspeed_zero3.pass_hidden_states_by_position()
        zero = {}
        if way == "offload":  # without DeepSpeedCPUAdam, which must be built: torch's AdamW, as for everybody
            zero = {"offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}}
        optimizer = adam(args, model.named_parameters())
        self.engine = deepspeed_zero3.initialize(model, optimizer, args, zero)

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
    main({"zero3": DeepSpeed, "offload": DeepSpeed})
