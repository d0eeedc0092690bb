"""A bucket group whose parameters are gathered by the schedule, and whose gradients may be reduced by it."""

from collections.abc import Callable

from megatron.core.distributed import param_and_grad_buffer as upstream

from megatron_ext.formats.moved_bytes import reduced_bytes
from megatron_ext.megatron.releases import accepted
from megatron_ext.runtime.gradients import Gradient
from megatron_ext.runtime.group import ScheduleError

WITHOUT_SCHEDULE = (
    "training goes on without its schedule: megatron_ext.megatron.hooks.on_train_setup was not called, or finish was"
)

NO_REDUCE = (
    "start_grad_sync of this fork of Megatron has begun no reduce: it reduces a gradient once in an iteration, and the "
    "schedule does so more often"
)


class _NoGradient:
    """Replaces ``main_grad`` of a parameter whose gradient will not get bytes again: adding to its freed storage would
    end the process without a message."""

    def __getattr__(self, name: str):
        raise ScheduleError(WITHOUT_SCHEDULE)


class ScheduledBucketGroup(upstream._ParamAndGradBucketGroup):
    """A bucket group whose parameters are gathered by the schedule, not by module hooks.

    Megatron reduces gradients that stay whole; the program reduces gradients that come and go. A request for parameters
    outside the schedule (``force_sync``: evaluation, checkpoints, hashes) makes all of them whole, or brings them in
    turn: in_turn.py.
    """

    executor = None

    gradient: Gradient | None = None
    """Set if the schedule says when the gradient is reduced."""

    reduced: Callable | None = None
    """Set if the group is stepped during the backward: called with the reduce of a gradient that stays whole."""

    def end(self) -> None:
        """The run has ended: further training raises an error."""
        self.executor = None
        if self.gradient is not None:
            for parameter in self.params:
                vars(parameter)["main_grad"] = _NoGradient()

    def issue_reduce(self, added: Callable[[], None]):
        """Begin Megatron's reduce-scatter of the bucket, with its scaling and checks; returns its handle. ``added``
        makes the current stream wait for the hooks that add gradients."""
        added()
        super().start_grad_sync()
        handle, self.grad_reduce_handle = begun_reduce(self), None
        return handle

    def register_grad_ready(self, *args, **kwargs):
        if self.gradient is None:
            super().register_grad_ready(*args, **kwargs)

    def finish_grad_sync(self, *args, **kwargs):
        if self.gradient is None:
            super().finish_grad_sync(*args, **kwargs)
        else:
            self.param_gather_dispatched = False

    def start_grad_sync(self, *args, **kwargs):
        if self.executor is None:
            raise ScheduleError(WITHOUT_SCHEDULE)
        if self.gradient is None:
            again = self.grad_reduce_handle is not None  # in interleaved pipelines Megatron asks twice and reduces once
            super().start_grad_sync(*args, **kwargs)
            if self.executor.recorder.counts and not again:
                sizes = self.intra_distributed_optimizer_instance_size, instances_of(self.ddp_config)
                size = reduced_bytes(self.buckets[0].grad_data.nbytes, *sizes)
                self.executor.recorder.moved("gradient", "network", size)
            if self.reduced is not None:
                self.reduced(begun_reduce(self))

    def start_param_sync(self, force_sync: bool = False):
        if force_sync and self.executor is not None:
            self.executor.sync_parameters()

    def finish_param_sync(self, skip_next_bucket_dispatch: bool = False):
        """Nothing to finish: the program waits for groups."""


def instances_of(config) -> int:
    """The number of optimizer instances that the replicas are divided into, from a DistributedDataParallelConfig."""
    return getattr(config, "num_distributed_optimizer_instances", 1)


def begun_reduce(bucket_group):
    """The object to wait on for the reduce that ``bucket_group`` has just begun. With several instances Megatron keeps
    no handle: both collectives run one after the other on a separate stream. (There is always a handle or a stream,
    because a schedule needs overlap_param_gather, which needs overlap_grad_reduce.)

    Raises:
        ScheduleError: no reduce has begun, because a fork's ``start_grad_sync`` reduces once in an iteration.
    """
    if (handle := bucket_group.grad_reduce_handle) is not None:
        return handle
    if instances_of(bucket_group.ddp_config) == 1:
        raise ScheduleError(NO_REDUCE)
    return bucket_group.communication_stream.record_event()


def replace_pre_hooks(ddp, unshard_all: Callable[[], None]) -> None:
    """Remove Megatron's module pre-hooks from a chunk: the program waits for groups instead.

    Callers that disable the hooks (evaluation, checkpoints) need all parameters whole, so ``unshard_all`` is called.
    """
    # Without the argument param_sync it always synchronises, which our bucket groups ignore at this point.
    ddp.disable_forward_pre_hook(**accepted(ddp.disable_forward_pre_hook, param_sync=False))

    def enable() -> None:
        """Nothing to enable: the program is always active."""

    def disable(param_sync: bool = True) -> None:
        if param_sync:
            unshard_all()

    ddp.enable_forward_pre_hook, ddp.disable_forward_pre_hook = enable, disable
