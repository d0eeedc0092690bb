"""Which curves are measured, at which sizes (factor 2, closer where neighbours disagree), and how that is announced.

[Note: No powers of two]
Shards that are a power of two apart in memory fall into the same sets of a processor's caches: an all-gather in host
memory of 1024 KiB took 15 to 19 % longer than one of 1056 KiB. Most groups of parameters do not have such sizes, so
their costs must not be interpolated between such sizes. For groups that do, a measurement is told their sizes.
"""

import os
from collections.abc import Mapping

from megatron_ext.measure.options import COPIES, MIB, MOST_OVER, STEPS, Options
from megatron_ext.workload.route import ALGORITHM_NAMES, ROUTES

SMALL_BYTES = 4096
"""Below this size only the smallest size is measured."""

GATHERS = {*ROUTES, *ALGORITHM_NAMES, "experts_gpu"}
"""Curves of gathers: all routes with all of their algorithms."""

CURVES = (*COPIES, "p2p", "optimizer", "host_add", *STEPS, "nvme", "publish_nvme")

DISAGREE = 0.15
"""If interpolation between its neighbours misses a size's median by more than this share, sizes are added around it."""


def factor_2(min_bytes: int, max_bytes: int, factor: int = 2) -> list[int]:
    """Sizes from ``min_bytes`` to ``max_bytes``, each ``factor`` times the previous one. Both ends are included."""
    sizes = [min_bytes]
    power = 1 << min_bytes.bit_length()
    while power < max_bytes:
        sizes.append(power)
        power *= factor
    if max_bytes > sizes[-1]:
        sizes.append(max_bytes)
    return sizes


def refinement(medians: Mapping[int, float], at_most: int = 4) -> list[int]:
    """Sizes to add halfway (by ratio) on both sides of the sizes at which linear interpolation is worst.

    ``medians``: microseconds by size. The worst sizes in microseconds come first, because a relative error of a small
    group costs little time. The list is empty if neighbours agree.
    """
    sizes = sorted(medians)
    misses = []
    for left, size, right in zip(sizes, sizes[1:], sizes[2:]):
        share = (size - left) / (right - left)
        read = medians[left] + share * (medians[right] - medians[left])
        misses.append((abs(read - medians[size]), left, size, right))
    added: list[int] = []
    for miss, left, size, right in sorted(misses, reverse=True):
        if miss <= DISAGREE * medians[size]:
            continue
        for low, high in ((left, size), (size, right)):
            # 3/4 of the upper end is the middle of a factor of 2, and a multiple of a power of two.
            middle = high * 3 // 4 if high * 3 // 4 > low else (low + high) // 2
            if middle not in medians and middle not in added:
                added.append(middle)
    return sorted(added[:at_most])


def sizes_of(name: str, options: Options) -> list[int]:
    """The grid of one curve. It is sparse if the cost is known to be smooth. Operations of a rank on its own shard are
    measured up to the size of experts' shards."""
    low, high, shards = options.min_bytes, options.max_bytes, options.largest_shards
    if name == "optimizer":
        sizes = factor_2(low, max(options.max_rank_bytes or high, low), factor=4)
    elif name == "host_add":
        sizes = factor_2(low, max(shards // options.data_parallel_size, low), factor=4)
    elif name in STEPS:
        sizes = factor_2(low, shards, factor=4)
    elif name == "p2p":
        sizes = factor_2(low, max(min(high, 16 * MIB), low))
    else:
        sizes = factor_2(max(low, min(SMALL_BYTES, high)), high)
        if low < sizes[0]:
            sizes = [low, *sizes]  # below that size the time of a call does not depend on the bytes
        # All but the two ends are a sixteenth smaller, see [Note: No powers of two].
        sizes = [sizes[0], *(size * 15 // 16 for size in sizes[1:-1]), *sizes[1:][-1:]]
    if name in GATHERS:
        sizes = [*sizes, *options.also_sizes]
    if name in ("publish", "internode") and shards > high:
        sizes = [*sizes, shards]
    return sorted({options.rounded(size) for size in sizes})


def curves_asked(options: Options) -> list[str]:
    """The curves of the links that are asked for and that the run has, except those of the drive."""
    return [name for name in CURVES if name in options.links and name != "nvme" and options.has(name)]


def announcement(options: Options) -> str:
    """The text that is printed before measuring begins: what will be measured and how long it takes, in two lines. A
    third line follows if an earlier measurement was kept."""
    curves = ", ".join(f"{name} ({len(sizes_of(name, options))})" for name in curves_asked(options))
    computes = "compute" in options.links and options.modules is not None
    others = ["host memory"] if "host_memory" in options.links else []
    others += ["the drive"] if "nvme" in options.links and options.has("nvme") else []
    others += ["compute"] if computes else []
    others += ["contention"] if "contention" in options.links else []
    most, kept = max(MOST_OVER * options.seconds, options.seconds + 10), options.keep_path
    goes_on = f"\ncontinues from {kept} if its options are the same" if kept and os.path.exists(kept) else ""
    return (
        f"measures with {options.world_size} ranks: curves (sizes) {curves or 'none'}; "
        f"{', '.join(others) or 'nothing else'}\n"
        f"takes about {options.seconds:.0f} s and at most {most:.0f} s once the ranks have started; "
        "if time runs out, large sizes are scaled from smaller ones and the last measurements are left out; the table "
        f"names them{goes_on}"
    )
