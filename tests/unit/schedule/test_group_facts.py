"""Which shards the optimizer can update in host memory."""

import pytest

from megatron_ext.schedule.group_facts import steps_on_host_shards
from megatron_ext.workload.optimizer_settings import OptimizerSettings


@pytest.mark.parametrize(
    ("main", "dtype", "able"),
    [("float32", "bfloat16", True), ("float32", "float32", False), ("int16", "bfloat16", False)],
)
def test_an_optimizer_on_the_device_updates_shards_in_host_memory_through_its_own_copies(main, dtype, able):
    """A precision-aware one (int16) keeps the bits that a shard lacks and writes the shard itself."""
    assert steps_on_host_shards(OptimizerSettings(main_parameter_dtype=main), dtype) is able
    assert steps_on_host_shards(OptimizerSettings(on_host=True), dtype)
