"""The reference of gradients that come and go: gradients stay whole as in Megatron, but are reduced and added up when
the schedule says, in plain PyTorch and one after another.

It adds in the same order as the run by the schedule, so the two are equal to the last bit. Nothing is freed, nothing
overlaps, and the shard is copied back to where Megatron expects the reduced gradient. If the schedule keeps a gradient
in host memory, for an optimizer that steps on the host, it is copied there, so that its norm is added up in the same
order.
"""

from functools import partial

import torch
from megatron.core.distributed import param_and_grad_buffer as upstream

from megatron_ext.megatron.scheduled_bucket_group import begun_reduce
from megatron_ext.megatron.shards import HeldGradient, hold_gradients, steps_on_the_host
from megatron_ext.runtime.step_calls import StepCalls
from megatron_ext.schedule.user_defined_schedule import Schedule


class ReferenceGradients(StepCalls):
    """The calls of Megatron's schedules around their steps in a reference run, see step_calls.py.

    Args:
        bucket_groups: Megatron's own bucket groups, with one bucket each, by group index.
        optimizers: Megatron's DistributedOptimizer objects of this rank.
    """

    def __init__(self, schedule: Schedule, bucket_groups: dict, optimizers: list):
        self._groups, self._microbatches, self._chunk = schedule.groups, 0, -1
        self._visits: dict[int, int] = {}
        self._kept = {}
        self._on_host: list[tuple[torch.Tensor, torch.Tensor]] = []  # a reduced part, and its copy in host memory
        held = []
        steps_on_host = any(map(steps_on_the_host, optimizers))
        for index, bucket_group in bucket_groups.items():
            if schedule.groups[index].gradients is None:
                continue
            bucket, rank = bucket_group.buckets[0], bucket_group.intra_distributed_optimizer_instance_rank
            numel = bucket.grad_data.numel() // bucket_group.intra_distributed_optimizer_instance_size
            part = bucket.grad_data[rank * numel : (rank + 1) * numel]
            self._kept[index] = bucket_group, part, torch.zeros_like(part)
            if steps_on_host and schedule.groups[index].gradients == "host":
                copy = torch.empty_like(part, device="cpu")
                self._on_host.append((part, copy))
                held.append(HeldGradient(bucket_group.params, copy, part.storage_offset(), True, part.device))
            # Gradients are reduced only below.
            own = vars(bucket_group)
            own |= dict.fromkeys(("register_grad_ready", "start_grad_sync"), lambda *args, **kwargs: None)
            own["finish_grad_sync"] = lambda *_, own=own, **__: own.update(param_gather_dispatched=False)
        hold_gradients(optimizers, held)
        for optimizer in optimizers if held else ():
            optimizer._copy_model_grads_to_main_grads = partial(self._take, optimizer._copy_model_grads_to_main_grads)

    def begin(self, schedule: Schedule) -> None:
        """An iteration by ``schedule`` begins."""
        self._groups, self._microbatches = schedule.groups, schedule.parallel.num_microbatches
        self._visits.clear()
        for _, _, shard in self._kept.values():
            shard.zero_()

    def pre_backward(self, virtual_microbatch_id: int, model_chunk_id: int) -> None:
        self._chunk = model_chunk_id

    def post_backward(self, virtual_microbatch_id: int) -> None:
        visit = self._visits[self._chunk] = self._visits.get(self._chunk, 0) + 1
        last = visit == self._microbatches
        for index, (bucket_group, part, shard) in self._kept.items():
            group = self._groups[index]
            if group.model_chunk_id == self._chunk and (last or visit % group.reduce_every == 0):
                upstream._ParamAndGradBucketGroup.start_grad_sync(bucket_group)
                begun_reduce(bucket_group).wait()
                bucket_group.grad_reduce_handle = None
                shard.add_(part)
                bucket_group.buckets[0].grad_data.zero_()

    def end_iteration(self) -> None:
        """The steps of the iteration have ended; Megatron uses the gradients next."""
        for _, part, shard in self._kept.values():
            part.copy_(shard)

    def _take(self, take, *args, **kwargs):
        """Replaces ``take``, the function with which an optimizer takes its gradients."""
        for part, copy in self._on_host:
            copy.copy_(part)
        return take(*args, **kwargs)
