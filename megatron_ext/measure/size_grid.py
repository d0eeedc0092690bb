"""Sizes to measure: factor 2, and closer where neighbours disagree.

[Note: No powers of two]
Shards that lie a power of two apart fall into the same sets of a processor's caches: over gloo an all-gather of
1024 KiB took 15 to 19 % longer than one of 1056 KiB. Most groups of parameters are not of such sizes, and no cost of
theirs may be read between these; for those that are, a measurement is told their sizes.
"""

from __future__ import annotations

from collections.abc import Mapping

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
    """Sizes to add halfway (by ratio) beside the sizes where linear reading is worst.

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
