"""torch.distributed.pipelining's interleaved 1F1B with FSDP2 a stage; one rank. Part of peers.py.

    peer_torch_pipelining.py WAY OPTIONS      WAY: shipped, one-stage

``shipped``: the schedule unshards up to three stages ahead, so with two stages a rank all
parameters are whole from their first use to the end of the iteration. ``one-stage``: the same
schedule, lowered with the smallest value of torch's own limit (max_active_stages=1), so that a
rank holds one stage at a time. Stages are Megatron's model chunks, so what is computed is equal.
"""

from peer_fsdp2 import full, shard, watch  # isort: skip  first: it makes Megatron work without a GPU

import torch
from megatron.core import parallel_state
from peer_training import Peer, adam, data_parallel_mesh, job, main
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B, schedules
from torch.distributed.tensor import DTensor


class Stage(nn.Module):
    """A model chunk as torch's pipeline calls one: what comes from the stage before is an argument."""

    def __init__(self, chunk, first: bool):
        super().__init__()
        self.chunk, self.first = chunk, first

    @property
    def decoder(self):
        """The chunk's layers, where ``shard`` looks for them."""
        return self.chunk.decoder

    def forward(self, inputs, *, tokens, position_ids, labels):
        if not self.first:
            self.chunk.set_input_tensor([inputs])
        mask = job.causal_mask(tokens.shape[1], tokens.device)
        return self.chunk(tokens, position_ids, mask, labels=labels if self.chunk.post_process else None)


class TorchPipelining(Peer):
    ways = ("shipped", "one-stage")

    def __init__(self, args, way, config, chunks):
        super().__init__(args, way, config, chunks)
        pp, rank = (
            parallel_state.get_pipeline_model_parallel_world_size(),
            parallel_state.get_pipeline_model_parallel_rank(),
        )
        watch(self.clock, self.whole)
        mesh, device = data_parallel_mesh(), torch.device("cpu")
        stages = []
        for number, chunk in enumerate(chunks):
            index = number * pp + rank
            module = Stage(chunk, index == 0)
            shard(module, mesh, reshard_after_forward=False)  # the schedule says when
            stages.append(
                PipelineStage(
                    module, index, pp * len(chunks), device, group=parallel_state.get_pipeline_model_parallel_group()
                )
            )
        self.stages = stages
        if way == "one-stage":
            add = schedules._add_unshard_reshard
            schedules._add_unshard_reshard = lambda actions, max_active_stages=1: add(actions, 1)
        self.schedule = ScheduleInterleaved1F1B(
            stages, args.num_microbatches, loss_fn=lambda output, target: output.float().mean()
        )
        self.clock.gathering(self.schedule, "_assert_unsharded")
        self.parameters = [parameter for stage in stages for parameter in stage.submod.parameters()]
        self.optimizer = adam(args, [named for stage in stages for named in stage.submod.named_parameters()])

    def forward_backward(self, iterator):
        rows = [next(iterator) for _ in range(self.args.num_microbatches)]
        keys = {key: torch.cat([row[key] for row in rows]) for key in ("tokens", "labels", "position_ids")}
        losses: list[torch.Tensor] = []
        inputs = (keys["tokens"],) if self.stages[0].is_first else ()
        target = keys["labels"] if self.stages[-1].is_last else None
        self.schedule.step(
            *inputs, target=target, losses=losses if target is not None else None, return_outputs=False, **keys
        )
        return [{"lm loss": loss.detach()} for loss in losses]

    def step(self):
        # Each stage knows its own gradients: the norm is over the pipeline as well.
        squares = full(nn.utils.get_total_norm([p.grad for p in self.parameters], foreach=True)) ** 2
        total = torch.tensor(squares)
        torch.distributed.all_reduce(total, group=parallel_state.get_pipeline_model_parallel_group())
        norm = total.sqrt()
        nn.utils.clip_grads_with_norm_([_local(p) for p in self.parameters], self.args.clip_grad, norm, foreach=True)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return norm.item()


def _local(parameter):
    """A stand-in with the rank's own gradient, which scaling in place needs no more than."""
    gradient = parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
    stand_in = torch.empty(0)
    stand_in = torch.empty_like(gradient)
    stand_in.grad = gradient
    return stand_in


if __name__ == "__main__":
    main(TorchPipelining)
