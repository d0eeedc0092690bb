"""Parts of an iteration next to their predictions, and the part that explains most of the difference."""

import pytest
from event_rows import events

from megatron_ext.report import parts


def test_waits_and_issuing_are_no_compute():
    """On a device the thread issues beside the stream."""
    seen = [
        *events(0, "compute", ("0F0", 0.0, 100.0), ("0B0", 100.0, 50.0)),
        *events(0, "wait", ("wait 0", 10.0, 30.0)),
        *events(0, "issue", ("unshard 0", 50.0, 5.0)),
        *events(1, "wait", ("wait 0", 100.0, 50.0)),
    ]
    one_rank = {"forward": 65.0, "wait": 30.0, "issue": 5.0, "backward": 50.0}  # rank 0, not the longest wait
    found = {part.name: part for part in parts.parts(seen, 160.0, [seen], 160.0, False)}
    assert {name: found[name].measured_us for name in one_rank} == one_rank
    assert sum(part.measured_us or 0.0 for name, part in found.items() if name not in parts.BY_LINK) == 160.0
    assert parts.parts(seen, 160.0, [seen], 160.0, True)[0].measured_us == 70.0  # on a device forwards include issuing


def test_parts_of_a_prediction_are_those_of_the_rank_that_is_slowest_in_the_run():
    predicted = [*events(0, "compute", ("0F0", 0.0, 90.0)), *events(1, "compute", ("0F0", 0.0, 100.0))]
    run = [*events(0, "compute", ("0F0", 0.0, 90.0), ("0B0", 90.0, 20.0)), *events(1, "compute", ("0F0", 0.0, 100.0))]
    found = {part.name: part for part in parts.parts(predicted, 100.0, [run], 110.0, False)}
    assert (found["forward"].predicted_us, found["forward"].measured_us) == (90.0, 90.0)
    assert (found["backward"].predicted_us, found["backward"].measured_us) == (0.0, 20.0)


@pytest.mark.parametrize("measured_us, name, link", [(9.0, "wait", "gpu"), (2.0, "backward", None)])
def test_the_part_that_differs_the_same_way_explains_it_and_of_waits_a_link(measured_us, name, link):
    rows = [("forward", 2.0, 2.5), ("backward", 4.0, 2.0), ("wait", 0.0, 3.0), ("gpu", 5.0, 9.0), ("cpu", 5.0, 6.0)]
    found = [parts.TimePart(*row) for row in rows]
    part, by = parts.explains(found, measured_us - 6.0)
    assert part.name == name and (by.name if by else None) == link
    assert parts.explains([parts.TimePart("forward", 1.0, 1.0)], 5.0) is None


def test_a_report_names_launches_where_the_device_waits_for_them():
    found = [parts.TimePart("backward", 600.0, 3000.0), parts.TimePart("launches", 2400.0, 4500.0, limits=True)]
    first, row, cause = parts.lines(found, 2100.0)
    assert row == "launches: 2.400 ms predicted, at most 4.500 measured"
    assert cause.startswith("launches explains most of the difference of +2.100 ms: +2.100 ms (100%)")
    hidden = [found[0], found[1]._replace(limits=False)]
    assert parts.as_json(hidden, 2400.0)["explains"] == "backward"
