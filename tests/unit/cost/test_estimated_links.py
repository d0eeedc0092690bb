"""The exchange of published shards between nodes, against counts by hand."""

import pytest
from msgspec.structs import replace

from megatron_ext.cost import hardware_sheet as sheets
from megatron_ext.cost.estimated_links import SheetLinks
from megatron_ext.workload.parallel import Parallel


def test_published_shards_travel_over_tcp_and_no_faster_than_the_network():
    """Each of 8 ranks on a node receives 1 GB/s, on a network of less as much as this carries."""

    def links(sheet, **how):
        how = {"dp": 16, **how}
        return SheetLinks(sheet, Parallel.of(pp=1, vp=1, microbatches=4, gpus_per_node=8, **how))

    sheet, ethernet = sheets.load("h100-rdma"), sheets.load("h100-ethernet")
    slow = sheets.drawn(sheet, sheets.slow_end)
    assert links(sheet, dp=8).between_nodes() is None
    for given, how, rate in ((sheet, {}, 8e3), (slow, {}, 8 * 0.4e3), (ethernet, {"dp": 2, "tp": 8}, 1e3)):
        assert links(given, **how).between_nodes().us_per_byte == pytest.approx(1 / rate)
    card = replace(ethernet.network.bytes_per_s, value=0.5e9)
    narrow = replace(ethernet, network=replace(ethernet.network, bytes_per_s=card))
    assert links(narrow).between_nodes().us_per_byte == pytest.approx(1 / (8 * 500 * 0.75))

    def slowdowns(sheet):
        rows = {(row.measured, row.busy): row.slowdown for row in links(sheet).contention()}
        return rows["gpu", "publish"], rows["publish", "gpu"]

    # It takes 1 of 42.5 GB/s, nearly all of 1.17 GB/s, and all of a link that it is as fast as.
    alone = sheet.disturbance.collective_beside_copy.value
    assert slowdowns(sheet) == pytest.approx((max(alone, 1 / (1 - 1 / 42.5)), 1.0))
    assert slowdowns(ethernet) == pytest.approx((2.0, 2 / 1.5625 / 0.75))
    assert slowdowns(narrow) == pytest.approx((2.0, 2.0))
