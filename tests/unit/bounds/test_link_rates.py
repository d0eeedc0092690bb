"""What the links of a rank bring in a time, at the most."""

import pytest
from planning_cases import make_table, make_workload

from megatron_ext.bounds.link_rates import LinkRates, least_enough
from megatron_ext.simulator.timing import Timing


def test_publishing_and_gathers_on_one_network_bring_no_more_than_it_carries():
    """Ten bytes a microsecond each way alone. A short copy from the host disturbs gathers for as long as it
    takes only, so it costs the mix nearly nothing."""
    work = make_workload(pp=1, vp=1, dp=2, order="no_pipeline")
    both = lambda a, b: ((a, b, 2.0), (b, a, 2.0))
    for contention, rate in (((), 20.0), (both("gpu", "publish"), 10.0), (both("gpu", "cpu"), 20.0)):
        table = make_table(work, gpu=(0.001, 10.0), cpu=(0.001, 1e5), publish=(0.001, 10.0), contention=contention)
        links = LinkRates(work, Timing(work, table), 0)
        assert links.least_us(1000.0, first=True) == pytest.approx(1000.0 / rate, rel=0.01)


def test_publishing_and_copies_that_disturb_each_other_take_each_its_own_time():
    """Both at ten bytes a microsecond, one after the other or half as fast at the same time: five in all."""
    work = make_workload(pp=1, vp=1, dp=2, order="no_pipeline")
    for slowdown, rate in ((1.0, 10.0), (1.5, 20 / 3), (2.0, 5.0), (9.0, 5.0)):
        contention = (("cpu", "publish", slowdown), ("publish", "cpu", slowdown))
        table = make_table(work, gpu=None, cpu=(0.001, 10.0), publish=(0.001, 10.0), contention=contention)
        links = LinkRates(work, Timing(work, table), 0)
        assert links.least_us(1000.0, first=True) == pytest.approx(1000.0 / rate, rel=0.01)
        assert links.least_us(1000.0) == pytest.approx(100.0, rel=0.01)


@pytest.mark.parametrize(("us", "us_per_byte"), [(1e-12, 1e-12), (1e12, 100.0)])
def test_bounds_end_at_both_ends_of_what_is_plausible(us, us_per_byte):
    work = make_workload(pp=1, vp=1, dp=2, order="no_pipeline")
    extreme = (us, 1 / us_per_byte)
    links = LinkRates(work, Timing(work, make_table(work, gpu=extreme, cpu=extreme, publish=extreme)), 0)
    for size in (1.0, 2.0**50):
        assert 0 < links.least_us(size, first=True) < float("inf")
        assert 0 < links.least_alone_us("gpu", size) < float("inf")


def test_a_search_for_a_time_that_is_never_enough_ends():
    with pytest.raises(AssertionError, match="outside the plausible range"):
        least_enough(1.0, lambda us: False, halvings=1)
