"""Figures of other tools as cost tables: the known formats and their readers."""

from megatron_ext.cost import curves_file, nccl_tests, nvbandwidth
from megatron_ext.cost.cost_table import CostTable
from megatron_ext.formats.errors import InputError

READERS = {"nccl-tests": nccl_tests.read, "nvbandwidth": nvbandwidth.read, "curves": curves_file.read}


def read(format: str, path, **options) -> CostTable:
    """Read another tool's log into a cost table. ``options`` are the options of the format's reader.

    Raises:
        InputError: the log is broken, in another unit, cut off or empty. The message names the line.
    """
    if format not in READERS:
        raise InputError(f"known formats: {', '.join(READERS)}", file="--import", value=format)
    return READERS[format](path, **options)
