"""Sizes of groups at which a curve can have its best rate."""

from megatron_ext.simulator.timing import PADDING_SHARE
from megatron_ext.workload.bucket_rules import buckets
from megatron_ext.workload.workload import Chunk, Workload, group_bytes


def largest_group(workload: Workload, chunks: tuple[Chunk, ...]) -> int:
    """Bytes of the largest group that these chunks can have: at most a bucket, and at most what the device may hold."""
    largest = max((group_bytes(part, workload.parallel) for chunk in chunks for part in buckets(chunk)), default=0)
    limit = workload.streamed_bytes
    return largest if limit is None else min(largest, limit)


def best_rate_sizes(measured: set[int], largest: int) -> set[int]:
    """Sizes at which a group of at most ``largest`` bytes can have its best rate.

    A curve is linear between measured sizes, so the best rate is at a measured size, at the largest group, or at the
    largest group that padding may carry past the measured sizes.
    """
    slack = max(measured, default=0) * PADDING_SHARE // (PADDING_SHARE - 1)
    return {size for size in (*measured, largest, slack) if 0 < size <= largest}
