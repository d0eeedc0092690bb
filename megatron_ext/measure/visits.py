"""Visits of a curve at a size: their order, what all ranks measured in them, and the rows that they become."""

import random
from statistics import median

from megatron_ext.measure.completion import sets_of_ranks, until_last
from megatron_ext.measure.fabric import Fabric
from megatron_ext.measure.options import COPIES
from megatron_ext.runtime.objects import gather_objects

QUARTERS = 4

ISSUED = {*COPIES, "nvme", "publish_nvme"}
"""Operations that return before they are complete; on a device the optimizer does, too."""


def shuffled(visits: list, number: int) -> list:
    """Pass ``number`` in an order of its own, the same on all ranks: what a gather costs depends on what
    went before it, and no size may always come behind the same."""
    return random.Random(number).sample(visits, len(visits))


def merge_visits(fabric: Fabric, own: dict, merged: dict) -> None:
    """Add a pass: ``merged[name, size]`` is a list over passes of (us that count, see completion.py, in each round,
    issued of all ranks)."""
    everyone = gather_objects({key: (value.us, value.issued_us) for key, value in own.items()})
    sets = {name: sets_of_ranks(name, fabric.options) for name, _ in own}
    for key in own:
        rounds = until_last(sets[key[0]], [theirs[key][0] for theirs in everyone])
        ranks = [rank for together in sets[key[0]] for rank in together]
        issued = [value for rank in ranks for value in everyone[rank][key][1]]
        merged.setdefault(key, []).append((rounds, issued))


def first_medians(merged: dict) -> dict[tuple[str, int], float]:
    """Of the first pass, by name and size; the same on all ranks."""
    return {visit: median(us for us_of_ranks in passes[0][0] for us in us_of_ranks) for visit, passes in merged.items()}


def curves_of(merged: dict, refined: set, on_device: bool = False) -> dict[str, list[dict]]:
    """Medians and 95th percentiles, by name then size; what a table is made of."""
    curves: dict[str, list[dict]] = {}
    for (name, size), passes in sorted(merged.items()):
        rounds = [us_of_ranks for times, _ in passes for us_of_ranks in times]
        us = sorted(value for us_of_ranks in rounds for value in us_of_ranks)
        point = {
            "size_bytes": size,
            "p50_us": median(us),
            "p95_us": us[min(int(len(us) * 0.95), len(us) - 1)],
            "samples": len(us),
            "medians_us": _medians_of_quarters(rounds),
            "passes": len(passes),
        }
        if (name, size) in refined:
            point["refined"] = True
        if name in ISSUED or (name == "optimizer" and on_device):
            point["issued_us"] = median(value for _, issued in passes for value in issued)
        curves.setdefault(name, []).append(point)
    return curves


def _medians_of_quarters(rounds: list[tuple[float, ...]]) -> list[float]:
    """Medians over all ranks of the rounds of each quarter, in the order of time."""
    parts = min(QUARTERS, len(rounds))
    cuts = [len(rounds) * part // parts for part in range(parts + 1)]
    return [median(us for us_of_ranks in rounds[start:end] for us in us_of_ranks) for start, end in zip(cuts, cuts[1:])]
