"""How a copy on a drive is read: the settings that `measure` found to be fastest, and that training uses."""

import msgspec

from megatron_ext.formats.errors import InputError

SECTOR_BYTES = 4096
"""Sizes of direct reads are multiples of this."""


class DriveReads(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``block_bytes`` per read, ``queue_depth`` reads in flight."""

    block_bytes: int = 4 << 20
    queue_depth: int = 32

    def check(self, field: str, *, file=None) -> "DriveReads":
        """Return the settings. Raises InputError if a value cannot be used."""
        for name in ("block_bytes", "queue_depth"):
            value = getattr(self, name)
            if value < 1:
                raise InputError("expected a positive whole number", file=file, field=f"{field}.{name}", value=value)
        if self.block_bytes % SECTOR_BYTES:
            message = f"expected a multiple of {SECTOR_BYTES}"
            raise InputError(message, file=file, field=f"{field}.block_bytes", value=self.block_bytes)
        return self
