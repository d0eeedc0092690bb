"""What a reduce is waited for by, what is said where a fork has begun none, and what is counted."""

from types import SimpleNamespace

import pytest
from megatron.core.distributed import param_and_grad_buffer as upstream

from megatron_ext.megatron.scheduled_bucket_group import NO_REDUCE, ScheduledBucketGroup, begun_reduce
from megatron_ext.runtime.group import ScheduleError


def bucket_group(handle, instances: int):
    stream = SimpleNamespace(record_event=lambda: "event")
    config = SimpleNamespace(num_distributed_optimizer_instances=instances)
    return SimpleNamespace(grad_reduce_handle=handle, communication_stream=stream, ddp_config=config)


@pytest.mark.parametrize("instances, handle, waited", [(1, "handle", "handle"), (2, None, "event")])
def test_a_reduce_is_waited_for_by_its_handle_or_where_its_stream_stands(instances, handle, waited):
    assert begun_reduce(bucket_group(handle, instances)) == waited


def test_a_fork_that_has_begun_no_reduce_is_named():
    with pytest.raises(ScheduleError, match=NO_REDUCE):
        begun_reduce(bucket_group(None, 1))


def test_a_reduce_that_megatron_asks_for_twice_is_counted_once(monkeypatch):
    """In an interleaved pipeline it is in flight when Megatron finishes the gradients of what it takes for the first
    batch, and begins none."""

    def begin(group):
        group.grad_reduce_handle = "handle"

    monkeypatch.setattr(upstream._ParamAndGradBucketGroup, "start_grad_sync", begin)
    moved = []
    group = ScheduledBucketGroup.__new__(ScheduledBucketGroup)
    group.executor = SimpleNamespace(recorder=SimpleNamespace(counts=True, moved=lambda *what: moved.append(what)))
    group.buckets = [SimpleNamespace(grad_data=SimpleNamespace(nbytes=1024))]
    group.ddp_config, group.intra_distributed_optimizer_instance_size = SimpleNamespace(), 4
    group.grad_reduce_handle = None
    for _ in range(2):
        group.start_grad_sync()
    assert moved == [("gradient", "network", 768)]
