"""A cost table as text."""

import pytest

from megatron_ext.cost import cost_table_text
from megatron_ext.cost.cost_table import Point


def test_roughness_names_the_largest_miss():
    points = (Point(size_bytes=1, p50_us=1), Point(size_bytes=2, p50_us=4), Point(size_bytes=3, p50_us=3))
    assert cost_table_text.largest_miss(points) == pytest.approx(0.5)
    assert cost_table_text.largest_miss(points[:2]) is None
