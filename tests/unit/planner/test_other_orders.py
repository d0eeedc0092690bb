"""Other orders of steps against what can be worked out by hand."""

import msgspec
import pytest
from planning_cases import flat, make_workload, table_of

from megatron_ext.formats.errors import InputError
from megatron_ext.planner.evaluate import evaluate
from megatron_ext.planner.other_orders import evaluate_order
from megatron_ext.workload.workload import Chunk, Workload

FORWARD, BACKWARD = 100.0, 200.0


def pipeline(pp=4, microbatches=8, **more) -> Workload:
    work = make_workload(
        pp=pp, vp=1, dp=2, microbatches=microbatches, order="1f1b" if pp > 1 else "no_pipeline", **more
    )

    def counted(chunk: Chunk) -> Chunk:
        return msgspec.structs.replace(chunk, activation_bytes=(1000,) * chunk.num_layers)

    return msgspec.structs.replace(work, chunks=tuple(map(counted, work.chunks)))


def costs(work, *, gpu=1e-6, p2p=None, **more):
    return table_of(work, gpu=gpu, forward=FORWARD, backward=BACKWARD, p2p=flat(p2p or 1e-6), **more)


def activations(result) -> list[int]:
    return [bill.memory.device_bytes["activations"] for bill in result.memory]


@pytest.mark.parametrize("pp, microbatches", [(2, 2), (4, 8), (4, 16), (8, 8)])
def test_with_a_flush_the_bubble_is_that_of_the_formula(pp, microbatches):
    """(p - 1) / (m + p - 1) with 1F1B and with GPipe, which differ in memory alone: p micro-batches, and m."""
    work = pipeline(pp, microbatches, p2p_bytes=0)
    table = costs(work)
    expected = (pp - 1) / (microbatches + pp - 1)
    one_by_one, gpipe = evaluate(work, table), evaluate_order(work, table, "gpipe")
    assert one_by_one.bubble_rate == pytest.approx(expected, abs=1e-6)
    assert gpipe.result.bubble_rate == pytest.approx(expected, abs=1e-6)
    assert gpipe.result.iteration_time_us == pytest.approx((microbatches + pp - 1) * 300, rel=1e-6)
    assert gpipe.in_flight == (microbatches,) * pp and gpipe.weight_versions == 1
    assert activations(one_by_one) == [2000 * (pp - rank) for rank in range(pp)]
    assert activations(gpipe.result) == [2000 * microbatches] * pp


def test_eager_1f1b_hides_messages_and_keeps_more():
    """Without messages it is as fast as 1F1B. With them a rank of 1F1B waits for a message there and one back in every
    round, and an eager rank has a forward to do meanwhile."""
    quick = pipeline(p2p_bytes=0)
    assert evaluate_order(quick, costs(quick), "eager_1f1b").result.iteration_time_us == pytest.approx(
        evaluate(quick, costs(quick)).iteration_time_us
    )
    work = pipeline(microbatches=32)
    table = costs(work, p2p=40.0)
    plain, eager = evaluate(work, table), evaluate_order(work, table, "eager_1f1b")
    # A round of 1F1B takes two messages more than its compute, an eager one nothing.
    assert plain.iteration_time_us > 32 * (FORWARD + BACKWARD) + 28 * 2 * 40
    assert eager.result.iteration_time_us < (32 + 3) * (FORWARD + BACKWARD) + 2 * 3 * 40 + 1
    assert eager.in_flight == (7, 5, 3, 1)
    assert activations(eager.result) == [2000 * number for number in eager.in_flight]


@pytest.mark.parametrize("pp", [1, 2, 4])
def test_without_a_flush_there_is_no_bubble_and_two_weight_versions(pp):
    work = pipeline(pp, 8, p2p_bytes=0)
    table = costs(work, reduce=flat(50.0), optimizer=flat(70.0))
    plain, other = evaluate(work, table), evaluate_order(work, table, "pipedream_2bw")
    assert other.result.bubble_rate == pytest.approx(0, abs=1e-6)
    assert other.result.iteration_time_us == pytest.approx(8 * 300 + 70, rel=1e-6)
    assert plain.iteration_time_us >= (8 + pp - 1) * 300 + 50 + 70
    assert other.result.lower_bound_us == pytest.approx(8 * 300 + 70)
    assert other.weight_versions == 2 and other.in_flight == tuple(range(pp, 0, -1))
    for one, two in zip(plain.memory, other.result.memory):
        whole = one.memory.device_bytes["whole_parameters"]
        assert two.memory.device_bytes == {**one.memory.device_bytes, "whole_parameters": 2 * whole}
        assert max(two.step_device_bytes) == two.memory.device_total_bytes


def test_several_iterations_in_a_row_fill_and_drain_the_pipeline_once():
    """The rate of K iterations together falls as (p - 1) / (K m + p - 1), towards that without a flush."""
    rates = []
    for iterations in (1, 2, 8):
        work = pipeline(4, 8 * iterations, p2p_bytes=0)
        rates.append(evaluate(work, costs(work)).bubble_rate)
        assert rates[-1] == pytest.approx(3 / (8 * iterations + 3), abs=1e-6)
    work = pipeline(4, 8, p2p_bytes=0)
    assert rates[0] > rates[1] > rates[2] > evaluate_order(work, costs(work), "pipedream_2bw").result.bubble_rate


def test_without_a_flush_a_link_can_still_be_what_takes_longest():
    work = pipeline(2, 2, p2p_bytes=0)
    table = costs(work, gpu=500.0, reduce=flat(400.0))
    assert evaluate_order(work, table, "pipedream_2bw").result.iteration_time_us == pytest.approx(500 + 400)
    fits = costs(work, gpu=200.0, reduce=flat(100.0))
    assert evaluate_order(work, fits, "pipedream_2bw").result.iteration_time_us == pytest.approx(2 * 300)


def test_at_zero_stage_3_every_iteration_gathers_and_the_shards_are_there_twice():
    work = pipeline(2, 4, zero_stage=3, p2p_bytes=0)
    table = costs(work, gpu=10.0)
    plain, other = evaluate(work, table), evaluate_order(work, table, "pipedream_2bw").result
    assert other.busy_us["gpu"] == pytest.approx(plain.busy_us["gpu"])
    assert plain.exposed_us[0] > 0 and other.exposed_us == pytest.approx(plain.exposed_us, rel=0.2)
    for one, two in zip(plain.memory, other.memory):
        assert two.memory.device_bytes["shards"] == 2 * one.memory.device_bytes["shards"]


def test_what_an_order_has_no_place_for_is_refused():
    interleaved = make_workload(pp=2, vp=2, microbatches=4)
    for order in ("eager_1f1b", "pipedream_2bw"):
        with pytest.raises(InputError, match="virtual_pipeline_model_parallel_size"):
            evaluate_order(interleaved, costs(interleaved), order)
    with pytest.raises(InputError, match="num_microbatches"):
        evaluate_order(pipeline(4, 3), costs(pipeline(4, 3)), "pipedream_2bw")
