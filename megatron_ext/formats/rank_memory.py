"""Bytes that one rank holds, by kind: as planned (the memory bill) or as counted while training (the census)."""

from collections.abc import Mapping

import msgspec

DEVICE_KINDS = (
    "whole_parameters",
    "shards",
    "gradients",
    "gradient_shards",
    "main_parameters",
    "optimizer_states",
    "activations",
    "buffers",
)
"""Kinds of bytes on the device.

``whole_parameters``: groups that are whole or being unsharded. ``shards``: shards with storage of their own.
``gradients``: Megatron's gradient buffers, whole gradients that come and go, and gradients that an optimizer on the
device gets from host memory. ``gradient_shards``: buffers in which reduced shards of gradients are added up, and fp32
copies of 16-bit gradients of groups that Megatron's host optimizer steps on the device.
``main_parameters``: fp32 copies of 16-bit parameters. ``optimizer_states``: moments.
``activations``: tensors that autograd has saved for backwards. ``buffers``: buffers of gathers, reduces and staging.
"""

HOST_KINDS = (
    *("shards", "gradients", "main_parameters", "optimizer_states", "previous_states"),
    *("host_copies", "staging_slots"),
)
"""Kinds of bytes in host memory. ``host_copies``: this rank's part of the node's copies of whole groups.
``previous_states``: copies, from before the step, of main parameters and optimizer states that are stepped during the
backward."""


class RankMemory(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """Bytes of one rank.

    Attributes:
        device_bytes: by kind, at the moment at which their sum is largest. Kinds without bytes are left out.
        host_bytes: by kind.
        nvme_bytes: this rank's part of the node's copies on the drive.
        at_step: the step in which the device holds most, or ``optimizer``.
    """

    device_bytes: dict[str, int]
    host_bytes: dict[str, int] = {}
    nvme_bytes: int = 0
    at_step: str = ""

    @property
    def device_total_bytes(self) -> int:
        """Device bytes of all kinds together, at the step in which they are most."""
        return sum(self.device_bytes.values())


def make(device: dict[str, int], host: dict[str, int], nvme_bytes: int = 0, at_step: str = "") -> RankMemory:
    """A RankMemory with its kinds in the order of the lists above. Kinds without bytes are left out."""
    assert not set(device) - set(DEVICE_KINDS) and not set(host) - set(HOST_KINDS)
    return RankMemory(
        device_bytes={kind: device[kind] for kind in DEVICE_KINDS if device.get(kind)},
        host_bytes={kind: host[kind] for kind in HOST_KINDS if host.get(kind)},
        nvme_bytes=nvme_bytes,
        at_step=at_step,
    )


def size_text(size: int) -> str:
    """Bytes for people: in GiB from 0.01 GiB on, otherwise the number of bytes."""
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 / 100 else f"{size}"


def kinds_text(held: Mapping[str, int]) -> str:
    """``held``, bytes by kind, in one line. Kinds without bytes are left out."""
    return ", ".join(f"{kind.replace('_', ' ')} {size_text(size)}" for kind, size in held.items() if size)


def text(memory: RankMemory) -> str:
    """One line for people: the sum and its kinds in MiB."""
    parts = [f"{kind.replace('_', ' ')} {size / 2**20:.1f}" for kind, size in memory.device_bytes.items()]
    line = f"device {memory.device_total_bytes / 2**20:.1f} MiB ({', '.join(parts)})"
    if memory.host_bytes:
        parts = [f"{kind.replace('_', ' ')} {size / 2**20:.1f}" for kind, size in memory.host_bytes.items()]
        line += f"; host {sum(memory.host_bytes.values()) / 2**20:.1f} MiB ({', '.join(parts)})"
    if memory.nvme_bytes:
        line += f"; drive {memory.nvme_bytes / 2**20:.1f} MiB"
    return line + (f"; peak at {memory.at_step}" if memory.at_step else "")
