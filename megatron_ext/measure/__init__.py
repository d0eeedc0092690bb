"""Measure what gathers, links and compute take on this machine, and write a cost table.

``measure(options)`` starts one process for every rank of the run, away from any training
loop, and returns the table.
"""

from megatron_ext.measure.options import Options

__all__ = ["Options", "measure"]


def measure(options: Options, progress=lambda done, total, what: None):
    """Measure on all ranks; ``progress(done, total, what)`` is called as it goes.

    Raises:
        InputError: an option that cannot be measured.
        RankFailed: a rank's process ended early.
    """
    from megatron_ext.measure import launch, table

    return table.assemble(options, launch.run(options, progress))
