"""Dividing a block between links so that they finish together.

The finish of several links that start together is earliest if all of them finish at the same moment. This is the
equal-finish split of divisible loads; FlexLink (arXiv 2510.15882) moves a share of a collective to PCIe by the same
rule.
"""

from functools import cache, lru_cache
from math import inf

from megatron_ext.formats.errors import InputError
from megatron_ext.simulator.activity_kinds import OTHER_LINK, link_of
from megatron_ext.simulator.timing import Timing
from megatron_ext.workload.route import Route, kind_of
from megatron_ext.workload.workload import Parameter, group_ranks


def finish_us(timing: Timing, route: str, size: int, others_busy: int) -> float:
    """Microseconds of a gather by ``route`` while ``others_busy`` other links are busy."""
    if size <= 0:
        return 0.0
    us = timing.fastest_us(route, size)
    link = link_of(route)
    if others_busy and not kind_of(route).staged:
        us *= 1.0 + timing.slowdowns.excess(link, size)[OTHER_LINK[link]]
    return us


def equal_finish(timing: Timing, size: int, routes: tuple[Route, ...]) -> dict[str, int]:
    """Bytes of ``size`` for each of ``routes``, so that the last route finishes as early as possible.

    The time is found by bisection: a link takes as many bytes as it can bring in that time. A link takes no bytes if
    its smallest measured gather is slower than that.
    """

    @cache  # each bisection over bytes begins with the same sizes
    def part_us(route: str, part: int) -> float:
        try:
            return finish_us(timing, route, part, len(routes) - 1)
        except InputError:  # below the measured sizes
            return 0.0

    def capacity(route: str, us: float) -> int:
        low, high = 0, size  # the most bytes that arrive within us
        while high - low > max(size // 4096, 1):  # ends: each turn halves the range, which is 2 or more
            middle = (low + high) // 2
            low, high = (middle, high) if part_us(route, middle) <= us else (low, middle)
        return low

    try:
        slowest = min(finish_us(timing, route, size, 0) for route in routes)
    except InputError:
        return {routes[0]: size}
    low, high = 0.0, slowest
    for _ in range(30):
        middle = (low + high) / 2
        if sum(capacity(route, middle) for route in routes) >= size:
            high = middle
        else:
            low = middle
    shares = {route: capacity(route, high) for route in routes}
    over = sum(shares.values()) - size
    largest = max(shares, key=lambda route: (shares[route], route))
    shares[largest] -= over
    return {route: share for route, share in shares.items() if share > 0}


def split_off(
    parameters: list[Parameter], target: int, *, at_most: bool = False
) -> tuple[list[Parameter], list[Parameter]]:
    """Split parameters into two parts, both in execution order. The first part has about ``target`` bytes, or no more
    than ``target`` bytes if ``at_most``: from the largest on, every parameter that still fits."""
    chosen: set[str] = set()
    left = target
    for parameter in sorted(parameters, key=lambda p: (-p.bytes, p.name)):
        # A parameter is taken if the part is then nearer to its target than without it.
        if parameter.bytes <= (left if at_most else 2 * left):
            chosen.add(parameter.name)
            left -= parameter.bytes
    inside = [p for p in parameters if p.name in chosen]
    return inside, [p for p in parameters if p.name not in chosen]


@lru_cache(maxsize=4)
def splitter(timing: Timing, routes: tuple[Route, ...]):
    """A rule for :func:`megatron_ext.planner.blocks.make_blocks` that makes one group for each link."""

    # Layers are alike, so their shares are computed once.
    shares_of = lru_cache(maxsize=None)(lambda size, ranks: equal_finish(timing.among(ranks), size, routes))

    def split(parameters: list[Parameter]) -> list[list[Parameter]]:
        if len(parameters) < 2:
            return [parameters]
        ranks = group_ranks(parameters, timing.workload.parallel)
        own, shares = timing.among(ranks), shares_of(sum(p.bytes for p in parameters), ranks)
        parts, rest = [], parameters
        *others, largest = sorted(shares, key=lambda name: (shares[name], name))

        def finish(cut: tuple[list[Parameter], list[Parameter]], route: str) -> float:
            sizes = [sum(p.bytes for p in part) for part in cut]
            sizes[1] -= sum(shares[other] for other in others[others.index(route) + 1 :])  # go by later links
            try:
                return max(finish_us(own, name, size, len(others)) for name, size in zip((route, largest), sizes))
            except InputError:  # the size was not measured
                return inf

        for route in others:
            # A few bytes too many on a slow link can cost more than they save.
            cuts = [split_off(rest, shares[route], at_most=at_most) for at_most in (False, True)]
            part, rest = min(cuts, key=lambda cut: finish(cut, route))
            if part and rest:
                parts.append(part)
            else:
                rest = part or rest
        return [rest, *parts]

    return split
