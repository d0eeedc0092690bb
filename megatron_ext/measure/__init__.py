"""Measure the times of gathers, links and compute on this machine, and build a cost table.

``measure(options)`` starts one process for every rank of the run, outside of any training
loop, and returns the table.
"""

import os
import sys
from importlib import util

import msgspec

from megatron_ext.measure.options import Options

__all__ = ["Options", "measure"]


def measure(options: Options):
    """Measure on all ranks. Progress is written to standard error.

    Under a launcher that has started the ranks (torchrun, srun) this process is one of them:
    rank 0 returns the table, the other ranks return None.

    Raises:
        InputError: an option that cannot be measured.
        RankFailed: a rank's process ended early.
    """
    from megatron_ext.measure import assemble_table, cluster_launch, local_launch
    from megatron_ext.runtime.stream_flags import pip_line

    found = util.find_spec("cuda") and util.find_spec("cuda.bindings")  # other packages use ``cuda`` as well
    if options.uses_cuda() and not found and os.environ.get("RANK", "0") == "0":
        print(f"without cuda-bindings schedules with copies over the host cannot train: {pip_line()}", file=sys.stderr)
    launched = cluster_launch.is_launched()
    options = cluster_launch.with_nodes(options)
    raw = (cluster_launch if launched else local_launch).run(options)
    return assemble_table.assemble_table(msgspec.structs.replace(options, threads=raw["threads"]), raw) if raw else None
