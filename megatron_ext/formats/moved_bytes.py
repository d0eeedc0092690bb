"""Bytes that one rank moves in an iteration, by kind and link: as planned, or as counted while training."""

from collections.abc import Iterable
from typing import Literal

Kind = Literal["gather", "gradient", "host_add", "step", "states", "shard", "publish"]
Link = Literal["to_device", "to_host", "drive_read", "drive_write", "host_memory", "network"]

KINDS: tuple[Kind, ...] = ("gather", "gradient", "host_add", "step", "states", "shard", "publish")
"""``gather``: whole groups on their way to the device. ``gradient``: reduces, and gradients between device and host.
``host_add``: additions of gradients in host memory. ``step``: the host's optimizer step. ``states``: optimizer states
between host and drive, and their copies for steps that may be taken back. ``shard``: new parameters on their way from
an optimizer to their shard. ``publish``: shards on their way to host copies and drives."""

LINKS: tuple[Link, ...] = ("to_device", "to_host", "drive_read", "drive_write", "host_memory", "network")
"""``to_device``, ``to_host``: copies between device and host. ``host_memory``: bytes that the processor reads and
writes; bytes of copies to and from device and drive count once. ``network``: bytes that the rank receives in
all-gathers, reduces and exchanges between nodes, over any link."""

THROUGH_HOST_MEMORY: tuple[Link, ...] = ("to_device", "to_host", "drive_read", "drive_write")

ADD_PASSES = 3
"""Bytes that adding in place moves per byte of a gradient: both terms are read and the sum is written."""

MovedBytes = dict[Kind, dict[Link, int]]
"""Bytes by kind and link. Kinds and links without bytes are left out."""

Row = tuple[Kind, Link, int]


def reduced_bytes(size_bytes: int, ranks: int, instances: int) -> int:
    """Bytes that one of ``ranks`` ranks receives when a gradient of ``size_bytes`` is reduced: in a reduce-scatter
    among these ranks, then in a ring all-reduce of its shard among ``instances`` that hold the same parameters."""
    shard = size_bytes // ranks
    return size_bytes - shard + 2 * (shard - shard // instances)


def add_up(rows: Iterable[Row]) -> MovedBytes:
    """The sums of ``rows``, in the order of the lists above. The bytes of copies to or from device and drive are added
    to ``host_memory``; they need no row of their own there."""
    found: dict[tuple[Kind, Link], int] = {}
    for kind, link, size in rows:
        for own in (link, "host_memory") if link in THROUGH_HOST_MEMORY else (link,):
            found[kind, own] = found.get((kind, own), 0) + size
    every: MovedBytes = {kind: {link: found[kind, link] for link in LINKS if found.get((kind, link))} for kind in KINDS}
    return {kind: links for kind, links in every.items() if links}


def by_link(moved: MovedBytes) -> dict[Link, int]:
    """Bytes by link, summed over all kinds."""
    return {link: total for link in LINKS if (total := sum(own.get(link, 0) for own in moved.values()))}


def byte_differences(planned: MovedBytes, counted: MovedBytes) -> list[tuple[Kind, Link, int, int]]:
    """``(kind, link, planned, counted)`` for every pair of kind and link whose bytes differ."""
    found = []
    for kind in KINDS:
        for link in LINKS:
            ours, theirs = (moved.get(kind, {}).get(link, 0) for moved in (planned, counted))
            if ours != theirs:
                found.append((kind, link, ours, theirs))
    return found
