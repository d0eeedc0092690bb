"""Stock Megatron's rule: what a large model's first stage gathers, and when."""

from planning_cases import make_workload

from megatron_ext.planner.stock import stock_schedule
from megatron_ext.schedule.validate import validate


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
