"""``python -m megatron_ext.workload.sizes WORKLOAD``: sizes that a measurement must cover.

Prints the bytes of the largest possible group (one chunk, rounded up to a power of two) and of
the largest rank's whole parameters.
"""

import sys

from megatron_ext.errors import InputError
from megatron_ext.workload.model import Workload, group_bytes, load


def largest_group_bytes(workload: Workload) -> int:
    """The largest chunk as one group: nothing larger is gathered at once."""
    largest = max((group_bytes(chunk.parameters, workload.parallel.dp) for chunk in workload.chunks), default=0)
    return max(largest, 512)


def largest_rank_bytes(workload: Workload) -> int:
    """Whole parameters of the pipeline rank that holds most."""
    return max(sum(chunk.bytes for chunk in workload.chunks_of_rank(rank)) for rank in range(workload.parallel.pp))


def main() -> int:
    if len(sys.argv) != 2:
        print("usage: python -m megatron_ext.workload.sizes WORKLOAD", file=sys.stderr)
        return 2
    try:
        workload = load(sys.argv[1])
    except InputError as error:
        print(f"megatron-ext: {error}", file=sys.stderr)
        return 2
    print(largest_group_bytes(workload), largest_rank_bytes(workload))
    return 0


if __name__ == "__main__":
    sys.exit(main())
