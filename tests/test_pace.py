"""Tables at the pace that the machine had in a turn (benchmarks/pace.py)."""

import sys
from pathlib import Path

import msgspec
import pytest
from planning_cases import random_case

from megatron_ext.cost.model import Curve, Point, Publish, Routes
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
    assert at_pace(TABLE, 1.0) == TABLE


def test_what_every_transport_takes_of_processors_takes_longer():
    used = Curve(points=(Point(size_bytes=8, p50_us=5.0, processor_us=3.0),), algorithms={"tree": (Point(size_bytes=8, p50_us=6.0, processor_us=4.0),)})
    routes, publish = Routes(gpu=used, cpu=used, nvme=used), Publish(cpu=used, nvme=used, internode=used)
    slow = at_pace(msgspec.structs.replace(TABLE, routes=routes, publish=publish, reduce=used, p2p=used, optimizer=used), 2.0)
    for curve in (slow.routes.gpu, slow.routes.cpu, slow.routes.nvme, slow.publish.cpu, slow.publish.nvme, slow.publish.internode, slow.reduce, slow.p2p):
        assert curve.points == (Point(size_bytes=8, p50_us=5.0, processor_us=6.0),)
        assert curve.algorithms["tree"] == (Point(size_bytes=8, p50_us=6.0, processor_us=8.0),)
    assert slow.optimizer.points[0].p50_us == 10.0


@pytest.mark.parametrize("seed", range(3))
def test_an_iteration_takes_longer_but_not_more_than_processors_do(seed):
    work, table = random_case(seed)
    usual, slow = (simulate(work, at_pace(table, factor)).step_time_us for factor in (1.0, 1.5))
    assert usual < slow <= 1.5 * usual * (1 + 1e-9)
