"""Sizes for which there is no time or memory: scaled by bytes from the measured sizes of the same curve.

[Note: What a visit needs]
The first pass goes from small sizes to large ones, all curves together. The least time that a visit needs (making its
tensors, warming up, one round) is assumed to grow with the bytes from the previous visit of the curve. A size that
needs more than its share of the time, or more than is left, is not visited. The table still has a row for it, on a
straight line through the two largest measured sizes. Its 95th percentile is the larger of this line and of a line
through zero, plus :data:`OFF_PER_DOUBLING` for each doubling. The notes name such sizes and this addition. From sizes
below :data:`LEAST_BYTES` nothing is scaled: such a curve ends at its largest measured size.
"""

from math import log2
from statistics import median

from megatron_ext.cost.curve import lookup
from megatron_ext.cost.measured_curve import Point
from megatron_ext.measure.options import MIB
from megatron_ext.measure.sampling import Samples

ROUNDS = 3
"""The least number of rounds of a visit, including warm-up."""

LONGEST_SHARE = 0.1
"""The largest share of all the time that one visit may need."""

LEAST_BYTES, OFF_PER_DOUBLING = MIB, 0.1
"""The least size from which others are scaled, and the relative error that is assumed for each doubling. Scaled from
sizes of 2 to 256 MiB, copies, the drive and AdamW of one H200 were off by up to 0.12 at twice the size and 0.23 at
eight times."""

Needs = dict[str, tuple[int, float]]
"""By curve, the size of its last visit and the least seconds that this visit needed."""


def needed(needs: Needs, name: str, size: int) -> float:
    """The least seconds that a visit needs; 0 if the curve has no size yet from which others can be scaled."""
    last_size, seconds = needs.get(name, (0, 0.0))
    if last_size < LEAST_BYTES and (not last_size or size <= 4 * LEAST_BYTES):  # scale from it later
        return 0.0
    return seconds * max(size / last_size, 1.0)


def need_of(samples: Samples, seconds: float, builds: bool) -> float:
    """The least seconds that a visit needs which took ``seconds``.

    Args:
        builds: whether the operation makes tensors for every size. Other time outside of the rounds (the first use of a
            communicator) is needed only once.
    """
    rounds = median(samples.us) / 1e6 * ROUNDS
    return max(seconds - sum(samples.us) / 1e6 + rounds if builds else rounds, 1e-6)


def add_scaled(points: list[dict], sizes: list[int]) -> list[dict]:
    """The rows of one curve, with scaled rows for the ``sizes`` that are larger than the measured sizes."""
    last, line = points[-1], [Point(size_bytes=row["size_bytes"], p50_us=row["p50_us"]) for row in points[-2:]]
    if last["size_bytes"] < LEAST_BYTES:
        return points
    scaled = []
    for size in (size for size in sizes if size > last["size_bytes"]):
        times, us = size / last["size_bytes"], lookup(line, size, extrapolate=True).us
        most = max(last["p95_us"] * times, us) * (1 + OFF_PER_DOUBLING * log2(times))
        row = last | {"size_bytes": size, "p50_us": us, "p95_us": most, "samples": 1, "medians_us": [us], "passes": 0}
        scaled.append(row | {"scaled_from": last["size_bytes"]})
    return points + scaled


def notes(name: str, rows: list[dict], asked: int | None) -> list[str]:
    """Notes on the sizes of a curve for which there was no time or memory. ``asked``: the largest size of its grid."""
    scaled = [row for row in rows if "scaled_from" in row]
    if scaled:
        off = max(row["p95_us"] / row["p50_us"] - 1 for row in scaled)
        most, measured = (scaled[place][field] / MIB for place, field in ((-1, "size_bytes"), (0, "scaled_from")))
        said = f"{len(scaled)} sizes to {most:.4g} MiB are scaled by their bytes from {measured:.4g} MiB"
        return [f"out of time or memory, {name}: {said}; they may take {off:.0%} longer"]
    if asked is not None and rows[-1]["size_bytes"] < asked:
        return [
            f"out of time or memory, {name}: ends at {rows[-1]['size_bytes']} bytes, too few to scale from them to "
            f"{asked}; use a larger --seconds, or --links with fewer names"
        ]
    return []
