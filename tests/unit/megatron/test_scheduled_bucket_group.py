"""What a reduce is waited for by, and what is said where a fork has begun none."""

from types import SimpleNamespace

import pytest

from megatron_ext.megatron.scheduled_bucket_group import NO_REDUCE, begun_reduce
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
