"""The changes from one cost table to another."""

from statistics import median

import msgspec

from megatron_ext.cost.combine_tables import PARTS, has
from megatron_ext.cost.cost_table import CostTable, Curve, part_named
from megatron_ext.cost.curve import covers, curves_of, lookup
from megatron_ext.cost.environment import PARTS as ENVIRONMENT


def compare(first: CostTable, second: CostTable) -> dict:
    """Relative changes (second over first, minus one).

    Returns:
        ``curves``: by field ``{median, largest, at_bytes, sizes, beyond}``. ``beyond`` lists the sizes at which the
        intervals of the two tables do not overlap, so that noise does not explain the change. ``figures``: parts that
        are numbers, and launches of layers. ``contention``: by ``A beside B`` (A while B is busy). ``compute``: by row.
        ``only``: parts that one table lacks. ``environment``: what differs.
    """
    result: dict = {name: {} for name in ("curves", "figures", "contention", "compute")}
    result |= {"only": {"first": [], "second": []}, "environment": []}
    for part in (*PARTS, "experts.gpu", "experts.reduce"):
        one, other = part_named(first, part), part_named(second, part)
        if has(one) != has(other):
            result["only"]["first" if has(one) else "second"].append(part)
        elif isinstance(one, Curve) and has(one):
            result["curves"][part] = _curve(one, other)
        else:
            result["figures"] |= _figures(part, one, other)
    both = (first, second)
    rows = [{(row.measured, row.busy, row.size_bytes): row.slowdown for row in table.contention} for table in both]
    for key in sorted(rows[0].keys() & rows[1].keys(), key=str):
        size = "" if key[2] is None else f", {key[2]} bytes"
        result["contention"][f"{key[0]} beside {key[1]}{size}"] = rows[1][key] / rows[0][key] - 1
    place = "rank {0.pp_rank} chunk {0.model_chunk_id}"
    layers = [{row.layer_kind or place.format(row): row for row in table.compute} for table in both]
    for key in sorted(layers[0].keys() & layers[1].keys()):
        before, after = layers[0][key], layers[1][key]
        result["compute"][key] = (after.forward_us + after.backward_us) / (before.forward_us + before.backward_us) - 1
        launches = [(row.forward_launch_us or 0) + (row.backward_launch_us or 0) for row in (before, after)]
        result["figures"] |= _figures(f"launches of {key}", *launches)
    for part in ENVIRONMENT:
        before, after = getattr(first.metadata, part), getattr(second.metadata, part)
        if isinstance(before, dict) and isinstance(after, dict):
            for name in sorted(before.keys() | after.keys()):
                if before.get(name) != after.get(name):
                    result["environment"].append(f"{part}.{name}: {before.get(name)} -> {after.get(name)}")
        elif before != after:
            result["environment"].append(f"{part}: {before} -> {after}")
    return result


def _figures(part: str, one, other) -> dict[str, float]:
    """Changes of a number, or of each number of a structure."""
    pairs = {part: (one, other)}
    if isinstance(one, msgspec.Struct):
        pairs = {f"{part}.{field}": (getattr(one, field), getattr(other, field)) for field in one.__struct_fields__}
    numbers = {name: pair for name, pair in pairs.items() if all(type(value) in (float, int) for value in pair)}
    return {name: after / before - 1 for name, (before, after) in numbers.items() if before and after}


def _curve(first: Curve, second: Curve) -> dict:
    sizes = sorted(
        point.size_bytes
        for mine, theirs in ((first, second), (second, first))
        for points in curves_of(mine).values()
        for point in points
        if any(covers(other, point.size_bytes) for other in curves_of(theirs).values())
    )
    changes, beyond = {}, []
    for size in dict.fromkeys(sizes):
        before, after = lookup(first, size), lookup(second, size)
        changes[size] = after.us / before.us - 1
        if after.low_us > before.high_us or after.high_us < before.low_us:
            beyond.append(size)
    if not changes:
        return {"median": None, "largest": None, "at_bytes": None, "sizes": 0, "beyond": []}
    at = max(changes, key=lambda size: abs(changes[size]))
    largest = {"median": median(changes.values()), "largest": changes[at], "at_bytes": at}
    return {**largest, "sizes": len(changes), "beyond": beyond}


def text(changes: dict) -> str:
    lines = []
    for part, change in changes["curves"].items():
        if change["sizes"] == 0:
            lines.append(f"{part:26} no size in common")
            continue
        beyond = f", beyond the noise at {len(change['beyond'])} sizes" if change["beyond"] else ""
        lines.append(
            f"{part:26} {change['median']:+8.1%} median, {change['largest']:+.1%} at {change['at_bytes']} bytes, of "
            f"{change['sizes']} sizes{beyond}"
        )
    lines += [f"{part:26} {change:+8.1%}" for part, change in changes["figures"].items()]
    lines += [f"compute {name:18} {change:+8.1%}" for name, change in changes["compute"].items()]
    contention = changes["contention"].items()  # its keys, which programs read, say "beside"
    lines += [f"contention {name.replace(' beside ', ' during '):34} {change:+8.1%}" for name, change in contention]
    lines += [f"only in the {which}: {', '.join(parts)}" for which, parts in changes["only"].items() if parts]
    lines += [f"environment: {line}" for line in changes["environment"]]
    return "\n".join(lines) or "nothing to compare"
