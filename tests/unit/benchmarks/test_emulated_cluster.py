"""What the emulated cluster says of a network rate: how long all-gathers take beside compute."""

import sys
from pathlib import Path

import pytest
from msgspec.structs import replace
from planning_cases import random_case, with_host_cpu

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))
from emulated_cluster import gathers_to_compute


@pytest.mark.parametrize("seed", range(4))
def test_compute_of_twice_the_time_or_half_the_processors_halves_it(seed):
    work, table = random_case(seed)
    table = replace(table, contention=())
    alone = gathers_to_compute(work, table)
    slow = replace(
        table,
        compute=[replace(row, forward_us=2 * row.forward_us, backward_us=2 * row.backward_us) for row in table.compute],
    )
    assert alone > 0 and gathers_to_compute(work, slow) == pytest.approx(alone / 2)
    machine = max(
        sum(
            work.parallel.node_of(rank, replica) == 0
            for rank in range(work.parallel.pp)
            for replica in range(work.parallel.dp)
        ),
        1,
    )
    shared = with_host_cpu(table, machine / 2)
    assert gathers_to_compute(work, shared) == pytest.approx(alone / 2)
