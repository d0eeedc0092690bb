"""Sizes for which there is no time or memory: scaled by their bytes from those of the same curve that were measured.

[Note: What a visit needs]
The first pass goes from small sizes to large ones, all curves together. What a visit needs at the least (making its
tensors, warming up, one round) is taken to grow with the bytes, from the visit before it. A size that needs more than
its share of the time, or more than is left, is not visited. The table holds it all the same, on a straight line through
the two largest sizes that were measured; its 95th percentile is the larger of this line and of what grows with the
bytes alone, and more by :data:`OFF_PER_DOUBLING`. The notes name such sizes and how much that is. Less than
:data:`LEAST_BYTES` says nothing of more: such a curve ends where it was measured.
"""

from math import log2
from statistics import median

from megatron_ext.measure.options import MIB
from megatron_ext.measure.sampling import Samples

ROUNDS = 3
"""That warm up and count, at the least."""

LONGEST_SHARE = 0.1
"""Of all the time, what one visit may need."""

LEAST_BYTES, OFF_PER_DOUBLING = MIB, 0.1
"""From what sizes others are scaled, and by how much they are off for each doubling: copies, the drive and AdamW of one
H200 at sizes of 2 to 256 MiB were off by up to 0.12 at twice the size, 0.23 at eight times."""

Needs = dict[str, tuple[int, float]]
"""By curve, the size of its last visit and the seconds that this needed at the least."""


def needed(needs: Needs, name: str, size: int) -> float:
    """Seconds that a visit needs at the least; 0 where the curve has no size yet from which others can be scaled."""
    last_size, seconds = needs.get(name, (0, 0.0))
    if last_size < LEAST_BYTES and (not last_size or size <= 4 * LEAST_BYTES):  # from it larger ones can be scaled
        return 0.0
    return seconds * max(size / last_size, 1.0)


def need_of(samples: Samples, seconds: float, builds: bool) -> float:
    """What a visit of ``seconds`` needs at the least.

    Args:
        builds: whether the operation makes tensors for every size; what else takes time besides the rounds (the first
            use of a communicator) comes once.
    """
    rounds = median(samples.us) / 1e6 * ROUNDS
    return max(seconds - sum(samples.us) / 1e6 + rounds if builds else rounds, 1e-6)


def upwards(visits: list[tuple[str, int]]) -> list[tuple[str, int]]:
    """Small sizes first, the curves in turns."""
    return sorted(visits, key=lambda visit: visit[1])


def add_scaled(points: list[dict], sizes: list[int]) -> list[dict]:
    """The rows of one curve with those of ``sizes`` that are larger than the measured ones."""
    last, before = points[-1], points[-2] if len(points) > 1 else None
    if last["size_bytes"] < LEAST_BYTES:
        return points
    slope = last["p50_us"] / last["size_bytes"]
    if before is not None and last["p50_us"] > before["p50_us"]:
        slope = (last["p50_us"] - before["p50_us"]) / (last["size_bytes"] - before["size_bytes"])
    scaled = []
    for size in (size for size in sizes if size > last["size_bytes"]):
        times = size / last["size_bytes"]
        us = last["p50_us"] + slope * (size - last["size_bytes"])
        most = max(last["p95_us"] * times, us) * (1 + OFF_PER_DOUBLING * log2(times))
        row = last | {"size_bytes": size, "p50_us": us, "p95_us": most, "samples": 1, "medians_us": [us], "passes": 0}
        scaled.append(row | {"scaled_from": last["size_bytes"]})
    return points + scaled


def notes(name: str, rows: list[dict], asked: int | None) -> list[str]:
    """What of a curve there was no time or memory for, and what certainty that costs. ``asked``: its largest size."""
    scaled = [row for row in rows if "scaled_from" in row]
    if scaled:
        off = max(row["p95_us"] / row["p50_us"] - 1 for row in scaled)
        most, measured = (scaled[place][field] / MIB for place, field in ((-1, "size_bytes"), (0, "scaled_from")))
        said = f"{len(scaled)} sizes to {most:.4g} MiB are scaled by their bytes from {measured:.4g} MiB"
        return [f"out of time or memory, {name}: {said}; they may take {off:.0%} longer"]
    if asked is not None and rows[-1]["size_bytes"] < asked:
        return [
            f"out of time or memory, {name}: ends at {rows[-1]['size_bytes']} bytes, which say nothing of {asked}; a "
            "longer --seconds, or --links with fewer names, measures it"
        ]
    return []
