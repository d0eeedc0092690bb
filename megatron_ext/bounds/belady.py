"""Farthest-in-future freeing: the fewest bytes that a sequence of requests can bring."""

from collections.abc import Hashable, Sequence
from math import inf


def missing_bytes(requests: Sequence[tuple[Hashable, int]], limit: float) -> list[float]:
    """For each request, the bytes that are missing and have to be brought. The cache is empty at first.

    Every byte is its own page of a cache of ``limit`` bytes. A request asks for all bytes of its key. A key always has
    the same number of bytes, at most ``limit``. Freeing the bytes that are needed farthest in the future brings the
    fewest bytes (Belady 1966), for every prefix of the sequence at once. Real schedules move groups, which can only
    bring more.
    """
    coming: dict[Hashable, list[int]] = {}
    for number in range(len(requests) - 1, -1, -1):
        coming.setdefault(requests[number][0], []).append(number)
    held: dict[Hashable, float] = {}
    free = limit
    found: list[float] = []
    for key, size in requests:
        coming[key].pop()
        missing = size - held.get(key, 0)
        found.append(missing)
        if not missing:
            continue
        held[key] = size
        free -= missing
        while free < 0:  # ends: each turn empties held by one key or brings free to 0
            victim = max(
                (other for other in held if other != key), key=lambda other: coming[other][-1] if coming[other] else inf
            )
            taken = min(held[victim], -free)
            free += taken
            if taken == held[victim]:
                del held[victim]
            else:
                held[victim] -= taken
    return found
