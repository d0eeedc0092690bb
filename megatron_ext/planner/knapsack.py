"""Choosing groups that fill a capacity best, or cover a need with the fewest bytes."""

from functools import lru_cache

LISTED = 10
"""Up to this many groups every combination is tried; beyond it, the largest groups first."""


@lru_cache(maxsize=1 << 14)
def best_fill(sizes: tuple[int, ...], capacity: int) -> tuple[int, ...]:
    """Indices of the ``sizes`` whose sum is the largest that is at most ``capacity`` (both in bytes).

    Among equal sums the one that takes earlier indices. Exact for up to :data:`LISTED` sizes,
    beyond that by taking the largest that still fit.
    """
    if len(sizes) > LISTED:
        chosen = []
        for index in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
            if sizes[index] <= capacity:
                chosen.append(index)
                capacity -= sizes[index]
        return tuple(sorted(chosen))
    sums: dict[int, tuple[int, ...]] = {0: ()}  # sum -> indices; the first found stays
    for index, size in enumerate(sizes):
        for total, chosen in list(sums.items()):
            if total + size <= capacity:
                sums.setdefault(total + size, (*chosen, index))
    return sums[max(sums)]


def least_cover(sizes: tuple[int, ...], short: int) -> tuple[int, ...]:
    """Indices of the ``sizes`` whose sum is the least that reaches ``short``, which all together do."""
    kept = best_fill(sizes, sum(sizes) - short)
    return tuple(index for index in range(len(sizes)) if index not in kept)
