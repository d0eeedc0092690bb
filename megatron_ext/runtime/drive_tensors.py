"""Tensors that lie in a file on a drive and are in memory only as far as the system has room.

[Note: Who may change them]
The pages of a mapped file are the kernel's page cache: it writes them to the drive and takes them back whenever memory
is short, so they never make a process exceed its memory. Megatron reads and fills states in its own code, by all kinds
of formats; with tensors of this kind it needs no memory for all of them. A drive that fails while such a tensor is read
ends the process with SIGBUS, because nobody can give the reader an error; :meth:`flush` says whether everything that
was written has reached the drive.
"""

import contextlib
import mmap
import os
from math import prod

import torch

from megatron_ext.formats.errors import InputError
from megatron_ext.runtime import drive

MADV_PAGEOUT = 21
"""madvise(2): take these pages out of memory now. Python's mmap has no name for it."""


class DriveTensors:
    """New tensors, zero at first, in a nameless file that goes with the last of them.

    Args:
        directory: on the drive.
        shapes: of the tensors.

    Attributes:
        tensors: contiguous, in the order of ``shapes``, each with a storage of its own.

    Raises:
        InputError: as :func:`drive.create` does.
    """

    def __init__(self, directory, shapes: list[torch.Size], dtype: torch.dtype = torch.float32):
        starts, size = [], 0
        for shape in shapes:
            starts.append(size)
            size += drive.aligned(prod(shape) * dtype.itemsize)
        descriptor = drive.create(directory, max(size, drive.BLOCK))
        try:
            self._directory, self._map = directory, mmap.mmap(descriptor, max(size, drive.BLOCK))
        finally:
            os.close(descriptor)  # the mapping holds the file
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
    """A tensor over ``memory`` from byte ``start``, whose storage is that part alone: who writes storages to a file
    writes no more than the tensor."""
    return torch.frombuffer(memory, dtype=dtype, count=prod(shape), offset=start).view(shape)
