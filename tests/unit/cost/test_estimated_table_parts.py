"""The parts of a table that are estimates, on other machines."""

from msgspec.structs import replace
from parallel_sizes import sized

from megatron_ext.cost import cost_table
from megatron_ext.cost import hardware_sheet as sheets
from megatron_ext.cost.combine_tables import combine
from megatron_ext.cost.estimated_table import estimate, parts_on_machines
from megatron_ext.workload.gpt_shapes import GptShape, MicroBatch, gpt_workload

SHAPE = GptShape(4, 256, 1024, 8, 8, 1024, 32, positions=64, tied=False)
BATCH = MicroBatch(64, 2)


def run_of(dp=16, gpus_per_node=8):
    parallel = sized(pp=1, vp=1, dp=dp, microbatches=4, gpus_per_node=gpus_per_node)
    return gpt_workload(SHAPE, parallel, BATCH)


def slow(sheet):
    return sheets.drawn(sheet, sheets.slow_end)


def test_estimated_parts_are_known_in_a_file_and_in_a_combined_table_until_they_are_replaced(tmp_path):
    sheet, work = sheets.load("h100-rdma"), run_of()
    cost_table.save(tmp_path / "t.json", estimate(sheet, work, BATCH))
    table = cost_table.load(tmp_path / "t.json")
    ends = lambda table, work=work: parts_on_machines(table, work, lambda own: (own, slow(own)))
    value, end = ends(table)
    assert {"routes.gpu", "publish.internode", "optimizer", "compute", "launches", "host_memory"} <= value.keys()
    assert all(part == cost_table.part_named(table, name) for name, part in value.items())
    for name, part in end.items():
        assert part == cost_table.part_named(estimate(slow(sheet), work, BATCH), name)
    measured = replace(table.routes.gpu, points=tuple(replace(p, samples=9) for p in table.routes.gpu.points))
    own = replace(
        table, metadata=replace(table.metadata, source=None), compute=(), routes=cost_table.Routes(gpu=measured)
    )
    both = combine({"measured.json": own, "estimated.json": table}, {"routes.gpu": "measured.json"})
    assert both.routes.gpu == measured
    assert ends(both) == [{name: part for name, part in each.items() if name != "routes.gpu"} for each in (value, end)]
    # Not for a table without a data sheet, and not for a workload of other sizes, which may not fit the machine.
    assert ends(own) == ends(table, run_of(dp=32, gpus_per_node=16)) == [{}]


def test_links_of_a_cluster_may_be_combined_with_the_compute_of_a_machine_without_a_network():
    node, cluster = (run_of(dp=dp) for dp in (8, 16))
    measured = replace(estimate(sheets.load("h100-rdma"), cluster, BATCH), compute=())
    measured = replace(measured, metadata=replace(measured.metadata, source=None))
    compute = estimate(sheets.load("a100-nvlink"), node, BATCH)
    both = combine({"links.json": measured, "compute.json": compute})
    assert both.metadata.source is not None and both.metadata.source.estimated_from is not None
    assert parts_on_machines(both, cluster, lambda sheet: (sheet, slow(sheet))) == [{}]
