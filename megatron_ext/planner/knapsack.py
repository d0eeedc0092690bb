"""Choosing groups that fill a capacity best, or that cover a need with the fewest bytes."""

from functools import lru_cache


@lru_cache(maxsize=1 << 14)
def best_fill(sizes: tuple[int, ...], capacity: int) -> tuple[int, ...]:
    """Indices of ``sizes`` whose sum is at most ``capacity`` (in bytes): from the largest on, every size that still
    fits."""
    chosen = []
    for index in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        if sizes[index] <= capacity:
            chosen.append(index)
            capacity -= sizes[index]
    return tuple(sorted(chosen))


def least_cover(sizes: tuple[int, ...], short: int) -> tuple[int, ...]:
    """Indices of ``sizes`` whose sum is at least ``short`` (in bytes): all but those that :func:`best_fill` can spare.
    The sum of all sizes must be at least ``short``."""
    kept = best_fill(sizes, sum(sizes) - short)
    return tuple(index for index in range(len(sizes)) if index not in kept)
