"""The workload of a run as far as its options say it: sizes and limits, not yet parameters."""

from megatron_ext.megatron.gpt_arguments import parallel_of
from megatron_ext.workload.model import SCHEMA_VERSION, Workload


def workload_of_run(args) -> Workload:
    """A workload without chunks for Megatron's (or the example's) options."""
    return Workload(schema_version=SCHEMA_VERSION, kind="workload", parallel=parallel_of(args), zero_stage=1, chunks=())
