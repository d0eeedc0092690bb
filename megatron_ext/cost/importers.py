"""Other tools' figures as a cost table: which formats are known, and who reads them."""

from megatron_ext.cost import curves_file, nccl_tests, nvbandwidth
from megatron_ext.cost.cost_table import CostTable
from megatron_ext.formats.errors import InputError

READERS = {"nccl-tests": nccl_tests.read, "nvbandwidth": nvbandwidth.read, "curves": curves_file.read}


def read(format: str, path, **options) -> CostTable:
    """Read another tool's log into a cost table, with options of this format's reader.

    Raises:
        InputError: the log is broken, in another unit, cut off or empty; the line is named.
    """
    if format not in READERS:
        raise InputError(f"known formats: {', '.join(READERS)}", file="--import", value=format)
    return READERS[format](path, **options)
