"""What ranks exchange: within a layer, over a link that copies share, and published shards between nodes."""

import pytest
from msgspec.structs import replace
from parallel_sizes import sized

from megatron_ext.cost import hardware_sheet as sheets
from megatron_ext.cost.cost_table import CostTable
from megatron_ext.cost.estimated_links import SheetLinks
from megatron_ext.cost.estimated_table import estimate
from megatron_ext.cost.layer_work import experts_share, forward_work, layer_parameters, recomputed_work
from megatron_ext.workload.gpt_shapes import ExpertShape, GptShape, MicroBatch, gpt_workload

GPT = GptShape(2, 2048, 8192, 16, 16, 32000, 128, tied=False)


def run_of(batch: MicroBatch, shape=GPT, **sizes):
    parallel = sized(**{"microbatches": 4, "gpus_per_node": 8, "dp": 4, "tp": 2, **sizes})
    return gpt_workload(shape, parallel, batch)


@pytest.mark.parametrize("shared", [0, 1])
def test_only_attention_and_a_shared_expert_all_reduce_in_a_layer_of_experts(shared):
    """The dispatcher gathers tokens among the parts of an expert alone; each rank gives it a part of the sequence."""
    shape = GPT._replace(experts=ExpertShape(8, 2, 1024, (0, 1), shared * 1024))
    batch = MicroBatch(64, 2, sequence_parallel=True, recompute="selective")
    work = run_of(batch, shape, ep=4)
    of_kind = dict(layer_parameters(work.chunks[0]))
    message, share = 2 * 128 * 2048.0, experts_share(work)
    dense, moe = (forward_work(kind, of_kind[kind], batch, 2, share) for kind in ("transformer", "moe"))
    assert dense.reduced_bytes == (message,) * 2 and moe.reduced_bytes == (message,) * (1 + shared)
    for module, kind, number in (("mlp", "transformer", 1), ("moe", "moe", shared), ("shared_experts", "moe", shared)):
        of_module = batch._replace(recompute_modules=(module,))
        again = recomputed_work(moe, kind, of_kind[kind], of_module, 2, share)
        assert again.reduced_bytes == (message,) * number, module


def test_the_ring_of_context_parallel_ranks_leaves_a_node_through_one_card():
    links = SheetLinks(sheets.load("h100-rdma"), run_of(MicroBatch(64, 2), dp=4, tp=4).parallel)
    card = 50e3 * 0.85
    assert links.sequence_gather(4).us_per_byte == pytest.approx(3 / 4 / card)
    assert links.gather(4).us_per_byte == pytest.approx(3 / 4 / (2 * card))  # NCCL has a ring for each card


def slowdowns(table: CostTable) -> dict[tuple[str, str], float]:
    return {(row.measured, row.busy): row.slowdown for row in table.contention}


def test_without_nvlink_copies_and_collectives_share_the_link_of_all_reduces():
    batch, sheet = MicroBatch(1024, 2), sheets.load("l40s")
    work = run_of(batch)
    table, links = estimate(sheet, work, batch), SheetLinks(sheet, work.parallel)
    # Two in each direction of a layer, one in each of the embedding and of the output layer.
    reduced_us = (2 * 4 + 2 + 2) * 2 * 2048 * 2048 * links.tensor_all_reduce().us_per_byte
    share = reduced_us / (table.compute[0].forward_us + table.compute[0].backward_us)
    found, alone = slowdowns(table), sheet.disturbance
    assert 0.3 < share < 0.9
    for transfer in ("cpu", "publish", "gpu", "reduce"):
        assert found[transfer, "compute"] == pytest.approx(1 + share)
    for copy in ("cpu", "publish"):
        assert found["compute", copy] == pytest.approx(alone.compute_beside_copy.value * (1 + share))
    assert found["compute", "gpu"] == pytest.approx(alone.compute_beside_collective.value * (1 + share))
    assert found["compute", "nvme"] == alone.compute_beside_copy.value  # from the drive to the host
    # Nothing is shared if a rank has whole layers, or with NVLink; a gather between nodes is not on the host link.
    for name, sizes in (("l40s", {"dp": 8, "tp": 1}), ("h100-nvlink", {})):
        found = slowdowns(estimate(sheets.load(name), run_of(batch, **sizes), batch))
        assert ("cpu", "compute") not in found and found["compute", "cpu"] == alone.compute_beside_copy.value


def test_published_shards_travel_over_tcp_and_no_faster_than_the_network():
    """Each of 8 ranks on a node receives 1 GB/s, on a network of less as much as this carries."""

    def links(sheet, **how):
        how = {"dp": 16, **how}
        return SheetLinks(sheet, sized(pp=1, vp=1, microbatches=4, gpus_per_node=8, **how))

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
