"""Tensors in a file on a drive, which the system keeps in memory only as far as it has room.

[Note: Who may change them]
The pages of a mapped file are the kernel's page cache. The kernel writes them to the drive and reclaims them whenever
memory is short, so they never make a process exceed its memory. Megatron reads and fills optimizer states in its own
code, in many formats; with these tensors it needs no memory for all of them at once. If a drive fails while such a
tensor is read, the process ends with SIGBUS, because the reader cannot be given an error. :meth:`flush` says whether
everything that was written has reached the drive.
"""

import contextlib
from math import prod

import torch

from megatron_ext.formats.errors import InputError
from megatron_ext.runtime import drive, shared_block

MADV_PAGEOUT = 21
"""madvise(2): move these pages out of memory now. Python's mmap has no name for it."""


class DriveTensors:
    """New tensors, zero at first, in a nameless file that exists as long as any of them.

    Args:
        directory: on the drive.
        shapes: of the tensors.

    Attributes:
        tensors: contiguous, in the order of ``shapes``, each with a storage of its own.

    Raises:
        InputError: as :func:`drive.create_file` does.
    """

    def __init__(self, directory, shapes: list[torch.Size], dtype: torch.dtype = torch.float32):
        starts, size = [], 0
        for shape in shapes:
            starts.append(size)
            size += drive.aligned(prod(shape) * dtype.itemsize)
        descriptor = drive.create_file(directory, max(size, drive.BLOCK))
        self._directory, self._map = directory, shared_block.mapped(descriptor, max(size, drive.BLOCK))
        self.tensors = [view(self._map, start, shape, dtype) for start, shape in zip(starts, shapes, strict=True)]

    def flush(self) -> None:
        """Bring everything to the drive and its pages out of memory.

        Raises:
            InputError: the drive could not take it.
        """
        try:
            self._map.flush()
        except OSError as error:
            why = f"cannot be written: {error.strerror}"
            raise InputError(why, field=drive.OPTION, value=str(self._directory)) from None
        with contextlib.suppress(OSError):  # before Linux 5.4
            self._map.madvise(MADV_PAGEOUT)


def view(memory, start: int, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """A tensor over ``memory`` from byte ``start``. Its storage is only that part, so code that writes storages to a
    file writes no more than the tensor."""
    return torch.frombuffer(memory, dtype=dtype, count=prod(shape), offset=start).view(shape)
