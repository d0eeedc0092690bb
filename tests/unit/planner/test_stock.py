"""Stock Megatron's rule: what a large model's first stage gathers, and when."""

import pytest
from planning_cases import make_table, make_workload

from megatron_ext.formats.errors import InputError
from megatron_ext.planner.stock import stock_schedule, synchronous_schedule
from megatron_ext.schedule.validate import validate
from megatron_ext.simulator.simulation import simulate
from megatron_ext.simulator.timing import Timing


def test_without_a_pipeline_the_buckets_of_a_layer_are_gathered_while_the_one_before_computes():
    work = make_workload(pp=1, vp=1, layers=4, hidden=8192, order="no_pipeline")
    schedule = validate(stock_schedule(work))
    first = schedule.ranks[0].steps[0]
    layers = {parameter.name: parameter.layer for parameter in work.chunks[0].parameters}
    assert len(schedule.groups) > 4 and len(first.unshard) == len(schedule.groups)
    for unshard in first.unshard:
        layer = min(layers[name] for name in schedule.groups[unshard.group].parameters)
        assert unshard.at == (layer - 1 if layer > 1 else -1)


def test_interleaved_stages_gather_all_buckets_at_once_the_last_layers_first():
    work = make_workload(layers=4, hidden=8192)
    schedule = validate(stock_schedule(work))
    first_stage = [u.group for u in schedule.ranks[0].start.unshard if schedule.groups[u.group].model_chunk_id == 0]
    assert len(first_stage) > 2 and first_stage == sorted(first_stage, reverse=True)
    others = [group for group in schedule.groups if (group.pp_rank, group.model_chunk_id) != (0, 0)]
    assert len(others) == 3


def test_a_small_model_has_one_bucket_a_stage():
    assert len(stock_schedule(make_workload(pp=1, vp=1, order="no_pipeline")).groups) == 1


def times(work, gather_us):
    """Of an iteration by stock Megatron with and without --overlap-param-gather, where a gather takes ``gather_us``."""
    table = make_table(work, gpu=(gather_us, 1e15), cpu=None, publish=None, p2p=(10.0, 1e15))
    timing = Timing(work, table)
    return [simulate(work, timing, rule(work)).iteration_time_us for rule in (stock_schedule, synchronous_schedule)]


@pytest.mark.parametrize("pp", [2, 4])
def test_with_1f1b_gathers_on_demand_add_up_over_the_stages_and_those_in_the_step_do_not(pp):
    """Each stage has one bucket. On demand it is gathered when the first micro-batch arrives."""
    work = make_workload(pp=pp, vp=1, microbatches=4, order="1f1b")
    none = times(work, 1e-6)[0]
    assert times(work, 70.0) == pytest.approx([none + 70.0 * pp, none + 70.0])


def test_interleaved_stages_wait_for_the_first_chunk_with_the_option_and_for_all_without():
    work = make_workload(pp=2, vp=2, microbatches=4)
    none = times(work, 1e-6)[0]
    # A forward takes 100: chunk 1 is there in time, and rank 1 gathers while it waits for rank 0.
    assert times(work, 70.0) == pytest.approx([none + 70.0, none + 140.0])


def test_no_schedule_file_waits_before_its_first_step():
    schedule = synchronous_schedule(make_workload(pp=2, vp=1, order="1f1b"))
    with pytest.raises(InputError, match="an unshard at the start must have a need_by"):
        validate(schedule)
