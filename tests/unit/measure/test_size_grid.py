"""Sizes to measure, and where they are refined."""

import pytest

from megatron_ext.measure import size_grid
from megatron_ext.measure.options import Options
from megatron_ext.measure.size_grid import announcement, sizes_of


def test_factor_2_grid_has_both_ends():
    assert size_grid.factor_2(4096, 65536) == [4096, 8192, 16384, 32768, 65536]
    assert size_grid.factor_2(5000, 20000) == [5000, 8192, 16384, 20000]
    assert size_grid.factor_2(4096, 4096) == [4096]
    assert (
        sizes_of("gpu", Options())[0] == 4096
        and sizes_of("gpu", Options())[-1] == 256 << 20
        and len(sizes_of("gpu", Options())) == 17
    )
    assert sizes_of("gpu", Options(min_bytes=512, max_bytes=65536)) == [512, 4096, 7680, 15360, 30720, 65536]
    assert sizes_of("gpu", Options(min_bytes=512, max_bytes=2048)) == [512, 2048]
    assert all(size & (size - 1) for size in sizes_of("gpu", Options())[1:-1]), (
        "shards of these would share sets of the caches"
    )


def test_refined_where_neighbours_disagree_only():
    straight = {1 << power: float(1 << power) for power in range(12, 20)}
    assert size_grid.refinement(straight) == []
    step = dict(straight) | {1 << 15: 2.0 * (1 << 15)}
    added = size_grid.refinement(step)
    assert 3 << 14 in added or 3 << 13 in added
    assert all((1 << 13) < size < (1 << 17) for size in added) and len(added) <= 4
    # What costs most is refined first, however far off small sizes are.
    assert all(size > 1 << 14 for size in size_grid.refinement(step | {1 << 13: 3.0 * (1 << 13)}, at_most=2))


@pytest.mark.parametrize(("seconds", "most"), [(2, 12), (30, 40), (50, 60), (100, 120)])
def test_the_most_seconds_that_are_announced_are_those_after_which_it_gives_up(seconds, most):
    assert f"takes about {seconds} s and at most {most} s" in announcement(Options(seconds=seconds))


def test_a_drive_that_is_measured_is_announced():
    links = ("gpu", "nvme", "contention")
    assert announcement(Options(links=links)).partition("\n")[0].endswith("); contention")
    assert "); the drive, contention\n" in announcement(Options(links=links, nvme_path="/"))
