"""Rows of values of several factors in which every two values that go together meet at least once."""

import itertools
import random
from collections.abc import Callable, Mapping, Sequence

CANDIDATES = 60
"""Rows that are drawn for each row that is taken."""

Row = dict[str, str]


def covering_rows(
    factors: Mapping[str, Sequence[str]], possible: Callable[[Row], bool], cost: Callable[[Row], float], seed: int = 0
) -> list[Row]:
    """Possible rows that cover all pairs of values which any possible row has; the same for the same arguments.

    Of rows that hold the first pair which is still missing, some are drawn, and the one is taken that brings most
    missing pairs for its ``cost``.
    """
    rows = [row for values in itertools.product(*factors.values()) if possible(row := dict(zip(factors, values)))]
    of_pair: dict[tuple, list[int]] = {}
    for index, row in enumerate(rows):
        for pair in pairs(row):
            of_pair.setdefault(pair, []).append(index)
    missing, draw, taken = dict.fromkeys(of_pair), random.Random(seed), []
    while missing:
        holding = of_pair[next(iter(missing))]
        drawn = draw.sample(holding, min(CANDIDATES, len(holding)))
        best = max(drawn, key=lambda index: sum(pair in missing for pair in pairs(rows[index])) / cost(rows[index]))
        for pair in pairs(rows[best]):
            missing.pop(pair, None)
        taken.append(rows[best])
    return taken


def pairs(row: Row) -> list[tuple]:
    """Every two of a row's values."""
    return list(itertools.combinations(row.items(), 2))
