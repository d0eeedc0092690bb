"""Other tools' figures as a cost table: which formats are known, and who reads them."""

from megatron_ext.cost import curves_file, nccl_tests, nvbandwidth
from megatron_ext.cost.cost_table import CostTable
from megatron_ext.cost.imported_table import COLLECTIVES
from megatron_ext.formats.errors import InputError

FORMATS = ("nccl-tests", "nvbandwidth", "curves")


def read(
    format: str,
    path,
    *,
    system: str | None = None,
    placement: str = "in_place",
    collective: str | None = None,
    algorithm: str | None = None,
) -> CostTable:
    """Read another tool's log into a cost table.

    Args:
        format: one of FORMATS.
        system: of a curves file with several systems, which one.
        placement: ``in_place`` or ``out_of_place``, where both were measured.
        collective: what an nccl-tests log measured, where it does not say.
        algorithm: name the curve, so that tables of several can be combined.

    Raises:
        InputError: the log is broken, in another unit, cut off or empty; the line is named.
    """
    if collective is not None and collective not in COLLECTIVES:
        raise InputError(f"known: {', '.join(COLLECTIVES)}", file="--collective", value=collective)
    if format == "nccl-tests":
        return nccl_tests.read(path, placement=placement, collective=collective, algorithm=algorithm)
    if format == "nvbandwidth":
        return nvbandwidth.read(path)
    if format == "curves":
        return curves_file.read(path, system=system, placement=placement)
    raise InputError(f"known formats: {', '.join(FORMATS)}", file="--import", value=format)
