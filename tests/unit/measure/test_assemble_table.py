"""What the notes of a measured table say."""

import pytest

from megatron_ext.cost import cost_table
from megatron_ext.measure import assemble_table
from megatron_ext.measure.compute_rounds import ROUNDS
from megatron_ext.measure.options import STEPS, Options


def raw(first, second, **more):
    return {"curves": {"gpu": [{"size_bytes": 2 << 20, "medians_us": [first, second], "passes": 2}]}, **more}


def test_a_table_with_options_of_several_values_can_be_read_back(tmp_path):
    point = {"p50_us": 10.0, "p95_us": 11.0, "samples": 5, "medians_us": [10.0], "issued_us": 1.0}
    points = [{"size_bytes": size, **point} for size in (512, 1024)]
    table = assemble_table.assemble_table(
        Options(module_args=("--num-layers", "8"), also_sizes=(512, 1024)), {"curves": {"gpu": points}}
    )
    cost_table.save(tmp_path / "table.json", table)
    options = cost_table.load(tmp_path / "table.json").metadata.source.options
    assert options["module_args"] == "--num-layers 8" and options["also_sizes"] == "512 1024"


def test_context_parallel_ranks_each_compute_a_part_of_a_sequence():
    point = {"p50_us": 10.0, "p95_us": 11.0, "samples": 5, "medians_us": [10.0], "issued_us": 1.0}
    row = {"layer_kind": "transformer", "samples": 5, "activation_bytes": 4096, "recompute_bytes": 0}
    row |= {"forward_us": 40.0, "forward_p95_us": 44.0, "backward_us": 80.0, "backward_p95_us": 88.0}
    curves = {"gpu": [{"size_bytes": size, **point} for size in (512, 1024)]}
    raw = {"curves": curves, "compute": {"rows": [row | {"forward_launch_us": 6.0, "backward_launch_us": 7.0}]}}
    whole, part = (assemble_table.assemble_table(Options(sequence_parts=parts), raw) for parts in (1, 4))
    (one,), (other,) = whole.compute, part.compute
    assert (one.forward_us, other.forward_us, other.backward_p95_us) == (40.0, 10.0, 22.0)
    assert (one.activation_bytes, other.activation_bytes, other.forward_launch_us) == (4096, 1024, 6.0)
    assert not any("context-parallel" in note for note in whole.metadata.notes)
    assert any("divided by 4 context-parallel ranks" in note for note in part.metadata.notes)


def test_both_ways_of_the_host_s_step_and_the_device_s_are_in_the_table():
    def curve(us):
        point = {"p95_us": 2 * us, "samples": 5, "medians_us": [us], "passes": 1}
        return [{"size_bytes": size, "p50_us": us, **point} for size in (512, 1024)]

    curves = {name: curve(us) for name, us in zip(STEPS, (30.0, 25.0, 20.0, 5.0), strict=True)}
    table = assemble_table.assemble_table(Options(optimizer_on_host=True), {"curves": curves})
    assert table.host_step.points[0].p50_us == 30.0 and table.device_step.points[0].p50_us == 5.0
    ways = {name: points[0].p50_us for name, points in table.host_step.algorithms.items()}
    assert ways == {cost_table.JOINED: 25.0, cost_table.CAST_ON_DEVICE: 20.0}


@pytest.mark.parametrize(
    ("first", "second", "said"), [(100.0, 109.0, False), (100.0, 112.0, True), (112.0, 100.0, True)]
)
def test_a_table_says_where_two_passes_disagree(first, second, said):
    assert bool(assemble_table.notes(raw(first, second))) == said


def test_a_table_says_what_there_was_no_time_for():
    assert "gpu while cpu is busy" in assemble_table.notes(raw(1.0, 1.0, unmeasured_pairs=[("gpu", "cpu")]))[0]
    once = {"curves": {"gpu": [{"size_bytes": 2 << 20, "medians_us": [1.0], "passes": 1}]}}
    assert "only one pass" in assemble_table.notes(once)[0]
    assert (
        assemble_table.notes(
            {"curves": {"gpu": [{"size_bytes": 2 << 20, "medians_us": [1.0], "passes": 1, "refined": True}]}}
        )
        == []
    )


def test_a_table_says_that_compute_was_measured_in_few_rounds():
    few, enough = (assemble_table.notes(raw(1.0, 1.0, compute={"rounds": rounds})) for rounds in (ROUNDS - 1, ROUNDS))
    assert len(few) == 1 and "are so long that only 3 rounds fit" in few[0] and enough == []


@pytest.mark.parametrize(("sharing", "said"), [(1, False), (8, True)])
def test_a_table_measured_on_a_shared_device_says_it(sharing, said):
    point = {"p50_us": 10.0, "p95_us": 11.0, "samples": 5, "medians_us": [10.0], "issued_us": 1.0, "passes": 1}
    points = [{"size_bytes": size, **point} for size in (512, 1024)]
    table = assemble_table.assemble_table(Options(), {"curves": {"gpu": points}, "ranks_per_device": sharing})
    assert table.metadata.hardware.get("ranks_per_device") == (sharing if said else None)
    assert any("shared device (8 ranks on one)" in note for note in table.metadata.notes) == said
