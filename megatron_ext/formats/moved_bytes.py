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
"""``to_device``, ``to_host``: copies between device and host. ``host_memory``: what the processor reads and writes, and
each byte of copies to and from device and drive once. ``network``: what the rank receives of all-gathers, reduces and
exchanges between nodes, over whatever links."""

THROUGH_HOST_MEMORY: tuple[Link, ...] = ("to_device", "to_host", "drive_read", "drive_write")

ADD_PASSES = 3
"""Bytes that adding in place moves for each byte of a gradient: both are read, the sum is written."""

MovedBytes = dict[Kind, dict[Link, int]]
"""Kinds and links without bytes are left out."""

Row = tuple[Kind, Link, int]


def reduced_bytes(size_bytes: int, ranks: int, instances: int) -> int:
    """What one of ``ranks`` receives of the reduce of a gradient of ``size_bytes``: a reduce-scatter among these, and
    behind it an all-reduce of its shard among ``instances`` that hold the same parameters, by a ring."""
    shard = size_bytes // ranks
    return size_bytes - shard + 2 * (shard - shard // instances)


def add_up(rows: Iterable[Row]) -> MovedBytes:
    """The sum of ``rows``, in the order of the lists above. A copy to or from device or drive needs no row of
    ``host_memory``."""
    found: dict[tuple[Kind, Link], int] = {}
    for kind, link, size in rows:
        for own in (link, "host_memory") if link in THROUGH_HOST_MEMORY else (link,):
            found[kind, own] = found.get((kind, own), 0) + size
    return {
        kind: {link: found[kind, link] for link in LINKS if found.get((kind, link))}
        for kind in KINDS
        if any(found.get((kind, link)) for link in LINKS)
    }


def by_link(moved: MovedBytes) -> dict[Link, int]:
    """All kinds together."""
    return {link: total for link in LINKS if (total := sum(own.get(link, 0) for own in moved.values()))}


def differences(planned: MovedBytes, counted: MovedBytes) -> list[tuple[Kind, Link, int, int]]:
    """``(kind, link, planned, counted)`` where these are not equal."""
    found = []
    for kind in KINDS:
        for link in LINKS:
            ours, theirs = (moved.get(kind, {}).get(link, 0) for moved in (planned, counted))
            if ours != theirs:
                found.append((kind, link, ours, theirs))
    return found
