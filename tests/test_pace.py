"""Tables at the pace that the machine had in a turn (benchmarks/pace.py)."""

import sys
from pathlib import Path

import msgspec
import pytest
from planning_cases import random_case

from megatron_ext.simulator import simulate

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
from in_turns import at_turn  # noqa: E402
from pace import at_pace, pace_of, relative_pace  # noqa: E402

_, TABLE = random_case(3)


def measured(*walks):
    return msgspec.structs.replace(TABLE, metadata=msgspec.structs.replace(TABLE.metadata, source={"pace": [list(walk) for walk in walks]}))


def test_pace_of_a_turn_is_that_of_its_walks_beside_the_table():
    table, beside = measured((1.0, 90.0), (2.0, 100.0), (3.0, 140.0)), measured((10.0, 110.0), (11.0, 130.0), (19.5, 200.0), (40.0, 50.0))
    assert pace_of(table)[0] == (1.0, 90.0)
    assert relative_pace(table, beside, {2: (9.0, 12.0), 5: (12.0, 15.0), 7: (19.0, 21.0)}) == {2: pytest.approx(1.2), 7: pytest.approx(2.0)}


def test_pace_between_turns():
    assert at_turn({2: 1.0, 6: 2.0}, 3) == pytest.approx(1.25)
    assert at_turn({2: 1.0, 6: 2.0}, 1) is None and at_turn({2: 1.0, 6: 2.0}, 7) is None


def test_what_processors_do_takes_longer_and_links_do_not():
    slow = at_pace(TABLE, 2.0)
    assert [row.forward_us for row in slow.compute] == [2 * row.forward_us for row in TABLE.compute]
    assert [row.backward_us for row in slow.compute] == [2 * row.backward_us for row in TABLE.compute]
    assert [point.p50_us for point in slow.routes.gpu.points] == [point.p50_us for point in TABLE.routes.gpu.points]
    with_use = msgspec.structs.replace(
        TABLE, routes=msgspec.structs.replace(TABLE.routes, gpu=msgspec.structs.replace(TABLE.routes.gpu, points=tuple(msgspec.structs.replace(p, processor_us=3.0) for p in TABLE.routes.gpu.points)))
    )
    assert {point.processor_us for point in at_pace(with_use, 2.0).routes.gpu.points} == {6.0}
    assert at_pace(TABLE, 1.0) == TABLE


@pytest.mark.parametrize("seed", range(3))
def test_an_iteration_takes_longer_but_not_more_than_processors_do(seed):
    work, table = random_case(seed)
    usual, slow = (simulate(work, at_pace(table, factor)).step_time_us for factor in (1.0, 1.5))
    assert usual < slow <= 1.5 * usual * (1 + 1e-9)
