"""One rank of every tensor-parallel group measures; it gets its part of the node that it will have in training."""

import pytest

from megatron_ext.cli.checkout_model import tensor_ranks
from megatron_ext.measure.options import Options
from megatron_ext.workload.parallel import Parallel


@pytest.mark.parametrize(
    ("tp", "dp", "instances", "measuring", "ranks"),
    [
        (1, 8, 1, None, 1),
        (8, 2, 1, 1, 8),  # two nodes, one rank on each
        (2, 8, 1, 4, 2),
        (8, 8, 1, None, 1),  # all of them on one node here, one on each in training
        (4, 4, 2, None, 2),
    ],
)
def test_a_rank_has_the_part_of_a_node_that_it_has_in_training(tp, dp, instances, measuring, ranks):
    parallel = Parallel.of(dp=dp, tp=tp, gpus_per_node=8, instances=instances, microbatches=1)
    assert tensor_ranks(Options(data_parallel_size=dp, ranks_per_node=measuring), parallel) == ranks
