"""Which curves are measured, at which sizes (factor 2, closer where neighbours disagree), and how that is announced.

[Note: No powers of two]
Shards that lie a power of two apart fall into the same sets of a processor's caches: an all-gather in host memory of
1024 KiB took 15 to 19 % longer than one of 1056 KiB. Most groups of parameters are not of such sizes, and no cost of
theirs may be read between these; for those that are, a measurement is told their sizes.
"""

import os
from collections.abc import Mapping

from megatron_ext.measure.options import COPIES, MIB, MOST_OVER, STEPS, Options
from megatron_ext.workload.route import ALGORITHM_NAMES, ROUTES

SMALL_BYTES = 4096
"""Below this there is only the least size."""

GATHERS = {*ROUTES, *ALGORITHM_NAMES, "experts_gpu"}
"""The routes, all of their ways."""

CURVES = (*COPIES, "p2p", "optimizer", "host_add", *STEPS, "nvme", "publish_nvme")

DISAGREE = 0.15
"""A size whose median its neighbours predict by more than this off gets sizes between them."""


def factor_2(min_bytes: int, max_bytes: int, factor: int = 2) -> list[int]:
    """Powers of two from ``min_bytes`` to ``max_bytes``; both ends are always measured."""
    sizes = [min_bytes]
    power = 1 << min_bytes.bit_length()
    while power < max_bytes:
        sizes.append(power)
        power *= factor
    if max_bytes > sizes[-1]:
        sizes.append(max_bytes)
    return sizes


def beside_powers(sizes: list[int]) -> list[int]:
    """``sizes`` with what lies between the ends a sixteenth smaller, see [Note: No powers of two]."""
    return [sizes[0], *(size * 15 // 16 for size in sizes[1:-1]), *sizes[1:][-1:]]


def refinement(medians: Mapping[int, float], at_most: int = 4) -> list[int]:
    """Sizes to add halfway (by ratio) besides the sizes where linear reading is worst.

    ``medians``: microseconds by size. Worst first, in microseconds: a small group is read wrong by a part
    of little; none where neighbours agree.
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
            # 3/4 of the upper end is the middle of a factor 2 as sizes go: a multiple of a power of two.
            middle = high * 3 // 4 if high * 3 // 4 > low else (low + high) // 2
            if middle not in medians and middle not in added:
                added.append(middle)
    return sorted(added[:at_most])


def sizes_of(name: str, options: Options) -> list[int]:
    """The grid of one curve. Sparse where the cost is known to be smooth. What a rank does with its own shard is
    measured up to the shards of experts."""
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
            sizes = [low, *sizes]  # below, a call takes what it takes, whatever the bytes
        sizes = beside_powers(sizes)
    if name in GATHERS:
        sizes = [*sizes, *options.also_sizes]
    if name in ("publish", "internode") and shards > high:
        sizes = [*sizes, shards]
    return sorted({options.rounded(size) for size in sizes})


def curves_asked(options: Options) -> list[str]:
    """Curves of the links that are asked for and that the run has, without those of the drive."""
    return [name for name in CURVES if name in options.links and name != "nvme" and options.has(name)]


def announcement(options: Options) -> str:
    """What will be measured and how long it takes, before it begins: two lines for people, and a third where something
    was kept."""
    curves = ", ".join(f"{name} ({len(sizes_of(name, options))})" for name in curves_asked(options))
    computes = "compute" in options.links and options.modules is not None
    others = ["host memory"] * ("host_memory" in options.links) + ["compute"] * computes
    others += ["contention"] * ("contention" in options.links)
    most, kept = MOST_OVER * options.seconds, options.keep_path
    goes_on = f"\ngoes on from {kept} where that was measured for the same" if kept and os.path.exists(kept) else ""
    return (
        f"measures with {options.world_size} ranks: curves (sizes) {curves or 'none'}; "
        f"{', '.join(others) or 'nothing else'}\n"
        f"takes about {options.seconds:.0f} s and at most {most:.0f} s once the ranks have started; "
        "sizes that do not fit in it are scaled from smaller ones, what comes last is left out, and the table says "
        f"which{goes_on}"
    )
