"""What the example keeps of each iteration does not grow with values that come again."""

from iteration_log import kept_once

from megatron_ext.formats.rank_memory import RankMemory


def test_values_that_alternate_are_kept_once():
    """The census of a rank whose host steps during the next iteration changes back and forth."""
    kept: dict[bytes, dict] = {}
    found = [kept_once(kept, RankMemory(device_bytes={"shards": n % 2}, host_bytes={"shards": 1})) for n in range(6)]
    assert found == [{"device_bytes": {"shards": n % 2}, "host_bytes": {"shards": 1}} for n in range(6)]
    assert len({id(one) for one in found}) == 2
