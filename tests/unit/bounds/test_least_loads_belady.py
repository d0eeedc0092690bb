"""The fewest bytes, against every way to free."""

import random
from functools import lru_cache
from itertools import accumulate, combinations

import pytest

from megatron_ext.bounds.least_loads import missing_bytes


def fewest(keys: tuple[str, ...], sizes: dict[str, int], limit: int) -> int:
    """By looking at all that may stay: every byte of a key by itself."""

    @lru_cache(None)
    def least(number: int, there: frozenset) -> int:
        if number == len(keys):
            return 0
        asked = frozenset((keys[number], byte) for byte in range(sizes[keys[number]]))
        others, room = there - asked, limit - len(asked)
        stays = [frozenset(kept) for kept in combinations(sorted(others), min(room, len(others)))]
        return len(asked - there) + min(least(number + 1, asked | kept) for kept in stays)

    return least(0, frozenset())


@pytest.mark.parametrize("seed", range(30))
def test_it_is_the_fewest_for_every_beginning(seed):
    draw = random.Random(seed)
    sizes = {key: draw.randint(1, 3) for key in "abcd"}
    limit = draw.randint(max(sizes.values()), sum(sizes.values()) - 1)
    keys = tuple(draw.choice("abcd") for _ in range(7))
    missing = missing_bytes([(key, sizes[key]) for key in keys], limit)
    for number, brought in enumerate(accumulate(missing), 1):
        assert brought == fewest(keys[:number], sizes, limit)


def test_parts_stay():
    """Room for one and a half: half of the other is still there when it comes again."""
    assert missing_bytes([("a", 2), ("b", 2), ("a", 2), ("b", 2)], 3) == [2, 2, 1, 1]
