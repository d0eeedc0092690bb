"""Sizes to measure, where they are refined, and what the notes of a table say."""

import pytest
from layers import Layer

from megatron_ext.cost import cost_table
from megatron_ext.measure import assemble_table, size_grid
from megatron_ext.measure.hostcpu.shared_processors import (
    LEAST_ROUNDS,
    MAX_COMPUTE_ROUNDS,
    MAX_REPEATS,
    ROUNDS,
    Place,
    Round,
    counts_within,
    kept_busy,
    nodes_sharing,
)
from megatron_ext.measure.layer_times import measure_compute, micro_batch_us
from megatron_ext.measure.options import Options
from megatron_ext.measure.rank_program import PASSES, parts_due, shuffled, sizes_of


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


def raw(first, second, **more):
    return {"curves": {"gpu": [{"size_bytes": 2 << 20, "medians_us": [first, second], "passes": 2}]}, **more}


def test_a_table_with_options_of_several_values_can_be_read_back(tmp_path):
    point = {"p50_us": 10.0, "p95_us": 11.0, "samples": 5, "medians_us": [10.0], "issued_us": 1.0}
    points = [{"size_bytes": size, **point} for size in (512, 1024)]
    table = assemble_table.assemble(
        Options(module_args=("--num-layers", "8"), sizes=(512, 1024)), {"curves": {"gpu": points}}
    )
    cost_table.save(tmp_path / "table.json", table)
    options = cost_table.load(tmp_path / "table.json").metadata.source.options
    assert options["module_args"] == "--num-layers 8" and options["sizes"] == "512 1024"


@pytest.mark.parametrize(
    ("first", "second", "said"), [(100.0, 109.0, False), (100.0, 112.0, True), (112.0, 100.0, True)]
)
def test_a_table_says_where_two_passes_disagree(first, second, said):
    assert bool(assemble_table.notes(raw(first, second))) == said


def test_a_table_says_who_else_was_busy_and_what_there_was_no_time_for():
    notes = assemble_table.notes(raw(1.0, 1.0, background_processors=1.5, unmeasured_pairs=[("gpu", "cpu")]))
    assert "other programs used 1.5 processors" in notes[0] and "gpu beside cpu" in notes[1]
    once = {"curves": {"gpu": [{"size_bytes": 2 << 20, "medians_us": [1.0], "passes": 1}]}}
    assert "only one pass" in assemble_table.notes(once)[0]
    assert (
        assemble_table.notes(
            {"curves": {"gpu": [{"size_bytes": 2 << 20, "medians_us": [1.0], "passes": 1, "refined": True}]}}
        )
        == []
    )


def test_every_layer_runs_forward_then_backward():
    runners = {"a": Layer(8), "b": Layer(64)}
    rows = measure_compute(runners, repeats=5, evict_bytes=1 << 16, warmup=2)
    assert [row.layer_kind for row in rows] == ["a", "b"]
    assert all(
        0 < row.forward_us <= row.forward_p95_us and 0 < row.backward_us <= row.backward_p95_us and row.samples == 5
        for row in rows
    )
    assert runners["a"].calls == ["forward", "backward"] * 7
    assert micro_batch_us(rows, runners) == pytest.approx(sum(row.forward_us + row.backward_us for row in rows))


def test_a_walk_comes_by_every_layer_of_a_kind():
    runners = {"a": Layer(8), "b": Layer(8)}
    runners["b"].visits = 3
    rows = measure_compute(runners, repeats=5, warmup=1)
    assert runners["b"].calls == (["forward"] * 3 + ["backward"] * 3) * 6 and [row.samples for row in rows] == [5, 15]
    a, b = rows
    assert micro_batch_us(rows, runners) == pytest.approx(
        a.forward_us + a.backward_us + 3 * (b.forward_us + b.backward_us)
    )


@pytest.mark.parametrize("micro_batch_s", [0.001, 0.02, 0.1, 0.2, 0.4, 0.7, 1.5, 4.0, 9.0])
@pytest.mark.parametrize("seconds", [7.5, 15.0, 30.0])
def test_walks_take_the_time_there_is_however_long_they_are(micro_batch_s, seconds):
    """Alone, and all ranks of two on a processor at once: three times a micro-batch."""
    rounds, repeats, warmup = counts_within(seconds, micro_batch_s * 1e6, parts=5)
    takes = 3 * micro_batch_s * rounds * (warmup + repeats)
    assert takes <= max(3 * seconds, 3 * micro_batch_s * LEAST_ROUNDS)
    assert repeats >= 1 and (rounds >= 5 if 3 * micro_batch_s * 5 <= seconds else rounds >= LEAST_ROUNDS)
    assert warmup or repeats == 1


def test_turns_are_rather_many_than_long():
    """A measurement that is stopped now and then must not have a stop in most of its rounds."""
    rounds, repeats, warmup = counts_within(94, 0.2e6, parts=5)
    assert rounds >= 40 and warmup + repeats <= 4
    assert counts_within(94, 100.0, parts=5) == (MAX_COMPUTE_ROUNDS, MAX_REPEATS, 1)


def test_a_table_says_that_compute_was_measured_in_few_rounds():
    few, enough = (assemble_table.notes(raw(1.0, 1.0, compute={"rounds": rounds})) for rounds in (ROUNDS - 1, ROUNDS))
    assert len(few) == 1 and "takes so long that there was time for 3" in few[0] and enough == []


def test_nodes_on_one_kernel_share_the_processors_that_both_may_use():
    two = frozenset((0, 1))
    assert nodes_sharing([Place(0, "a", two), Place(0, "a", two)]) == 1
    assert nodes_sharing([Place(n, "a", two) for n in range(4)]) == 4  # four emulated nodes
    assert nodes_sharing([Place(n, str(n), two) for n in range(4)]) == 1  # four machines
    assert nodes_sharing([Place(0, "a", frozenset((0,))), Place(1, "a", frozenset((1,)))]) == 1


def test_processors_are_not_kept_busy_until_the_last_rank_is_done():
    even, uneven = [Round(0, 200, 100)] * 4, [Round(0, 150, 100)] * 2 + [Round(0, 250, 100)] * 2
    assert kept_busy([[one] for one in even], processors=2) == 1.0
    assert kept_busy([[one] for one in uneven], processors=2) == 400 / 500
    assert (
        kept_busy([list(rounds) for rounds in zip(uneven, even, uneven)], processors=2) == 400 / 500
    )  # the median round


def test_gathers_are_measured_at_further_sizes_beside_the_grid():
    options = Options(min_bytes=4096, max_bytes=16384, also_sizes=(10000, 70000))
    assert sizes_of("gpu", options) == sizes_of("cpu", options) == [4096, 7680, 10240, 16384, 70144]
    assert sizes_of("reduce", options) == [4096, 7680, 16384]  # what is no gather is not asked for
    assert options.largest == 70144  # and there is memory for it


def test_passes_walk_the_same_sizes_in_orders_of_their_own():
    visits = [("gpu", 1 << power) for power in range(12, 24)]
    orders = [shuffled(visits, number) for number in range(5)]
    assert all(sorted(order) == visits for order in orders)
    assert len({tuple(order) for order in orders}) == 5 and len({order[0] for order in orders}) > 1
    assert orders[3] == shuffled(visits, 3)  # as on every other rank


def test_compute_is_measured_all_along_however_short_the_passes_are():
    assert [parts_due(used / 20) for used in range(21)] == sorted(parts_due(used / 20) for used in range(21))
    assert parts_due(0.01) == 1 and parts_due(0.5) == (PASSES + 1) // 2 and parts_due(0.99) < PASSES
    assert parts_due(1.0) == parts_due(3.0) == PASSES
