"""How a copy on a drive is read: the settings that `measure` found to be fastest, and that training uses."""

import msgspec

from megatron_ext.formats.checks import Checker

SECTOR_BYTES = 4096
"""Sizes of direct reads are multiples of this."""


class DriveReads(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``block_bytes`` per read, ``queue_depth`` reads in flight."""

    block_bytes: int = 4 << 20
    queue_depth: int = 32

    def check(self, field: str, *, file=None) -> "DriveReads":
        """Return the settings. Raises InputError if a value cannot be used."""
        check = Checker(file)
        for name in ("block_bytes", "queue_depth"):
            if (value := getattr(self, name)) < 1:
                check.refuse("expected a positive whole number", f"{field}.{name}", value)
        if self.block_bytes % SECTOR_BYTES:
            check.refuse(f"expected a multiple of {SECTOR_BYTES}", f"{field}.block_bytes", self.block_bytes)
        return self
