"""Tables at the speed that the machine had at some time."""

import sys
from pathlib import Path

import msgspec
import pytest
from planning_cases import random_case, with_host_cpu

from megatron_ext.planner.evaluate import evaluate

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))
from clock_drift import at_speed, relative_speed
from interleaved_ab import at_slice

_, TABLE = random_case(3)


def measured(*rounds):
    table = with_host_cpu(TABLE, 2.0)
    return msgspec.structs.replace(table, host_cpu=msgspec.structs.replace(table.host_cpu, compute_rounds=rounds))


def test_speed_of_a_round_is_that_of_compute_within_it():
    table = measured((1.0, 90.0), (2.0, 100.0), (3.0, 140.0))
    beside = measured((10.0, 110.0), (11.0, 130.0), (19.5, 200.0), (40.0, 50.0))
    assert relative_speed(table, beside, {2: (9.0, 12.0), 5: (12.0, 15.0), 7: (19.0, 21.0)}) == {
        2: pytest.approx(1.2),
        7: pytest.approx(2.0),
    }


def test_speed_between_rounds():
    assert at_slice({2: 1.0, 6: 2.0}, 3) == pytest.approx(1.25)
    assert at_slice({2: 1.0, 6: 2.0}, 1) is None and at_slice({2: 1.0, 6: 2.0}, 7) is None


def test_what_processors_do_takes_longer_and_links_do_not():
    table = with_host_cpu(TABLE, 2.0, {"routes.gpu": 3.0})
    slow = at_speed(table, 2.0)
    assert [row.forward_us for row in slow.compute] == [2 * row.forward_us for row in TABLE.compute]
    assert [row.backward_us for row in slow.compute] == [2 * row.backward_us for row in TABLE.compute]
    assert slow.routes == table.routes
    assert {point.us for point in slow.host_cpu.processor_us["routes.gpu"]} == {6.0}
    assert at_speed(table, 1.0) == table


@pytest.mark.parametrize("seed", range(3))
def test_an_iteration_takes_longer_but_not_more_than_processors_do(seed):
    work, table = random_case(seed)
    usual, slow = (evaluate(work, at_speed(table, factor)).iteration_time_us for factor in (1.0, 1.5))
    assert usual < slow <= 1.5 * usual * (1 + 1e-9)
