"""Groups come whole one after the other where they never fit together."""

import pytest
import torch
from one_rank import OneRank
from planning_cases import make_table, make_workload

from megatron_ext.planner import plan
from megatron_ext.runtime.group import GroupState, ScheduleError
from megatron_ext.runtime.in_turn import InTurn
from megatron_ext.schedule.footprint import device_peaks


def rank_in_turn(room: float = 1.0, **shape) -> OneRank:
    """With ``room`` of the whole parameters that its schedule needs at once."""
    work = make_workload(zero_stage=3, whole_parameter_bytes=100_000, layers=4, **shape)
    rank = OneRank(plan(work, make_table(work), policy="random:3"), work)
    chunks = {index: rank.schedule.groups[index].model_chunk_id for index in rank.groups}
    most = int(device_peaks(rank.schedule)[0] * room)
    rank.executor.in_turn = InTurn(rank.groups, rank.clock, rank.issue, rank.layers, chunks, most)
    return rank


def evaluate(rank: OneRank) -> None:
    calls = rank.executor.evaluation()
    for number in range(2):
        for chunk in range(len(rank.workload.chunks_of_rank(0))):
            rank.layers.armed = []
            calls.pre_forward(number, chunk)
            rank.compute(chunk, range(rank.layers.num_layers(chunk)), {b: f for b, f, _ in rank.layers.armed})
    calls.end_iteration()


@pytest.mark.parametrize("shape", [dict(), dict(pp=1, vp=1, order="no_pipeline")])
def test_an_evaluation_finds_every_layer_whole_within_the_bytes_of_training(shape):
    rank = rank_in_turn(**shape)
    peak = device_peaks(rank.schedule)[0]
    assert peak < sum(group.bytes for group in rank.groups.values()), "or this says nothing"
    for _ in range(2):
        rank.iteration()
        rank.executor.params_updated()
        evaluate(rank)  # its layers check
        assert rank.residency.peak <= peak and rank.residency.bytes == 0
    rank.iteration()
    assert rank.executor.peak_bytes == peak


def test_groups_of_the_next_layers_are_gathered_beside_the_compute_where_there_is_room():
    waited = {}
    for room in (2.0, 1.0):
        rank = rank_in_turn(room)
        calls = rank.executor.evaluation()
        calls.pre_forward(0, 0)
        waited[room] = sum(group.state is GroupState.UNSHARDING for group in rank.groups.values())
        calls.end_iteration()
    assert waited == {2.0: 1, 1.0: 0}


def test_who_reads_gets_one_group_at_a_time_and_training_goes_on():
    rank = rank_in_turn()
    rank.iteration()
    rank.executor.params_updated()
    in_turn = rank.executor.in_turn
    for index, group in rank.groups.items():
        storages = {group.whole.untyped_storage()._cdata}
        assert in_turn.missing(storages) and in_turn.groups_of(storages) == [in_turn.group_of(group.whole)] == [index]
        rank.executor.read((index,))
        assert torch.all(group.whole == rank.clock.version) and not in_turn.missing(storages)
        assert [one for one in rank.groups if rank.groups[one].state is not GroupState.SHARDED] == [index]
    assert in_turn.group_of(torch.zeros(1)) is None
    rank.iteration()


def test_values_that_a_reader_writes_stay_when_the_next_group_comes():
    rank = rank_in_turn()
    first, second, *_ = rank.groups
    rank.executor.read((first,))
    rank.groups[first].whole.fill_(7)
    rank.executor.read((second,))
    assert torch.all(rank.groups[first].shard == 7) and torch.all(rank.groups[second].shard != 7)


def test_more_at_once_than_there_is_room_for_is_refused_with_the_bytes():
    rank = rank_in_turn(room=1.0)
    need = sum(group.bytes for group in rank.groups.values())
    more = need - device_peaks(rank.schedule)[0]
    with pytest.raises(ScheduleError, match=f"^{need} bytes of parameters are used at once, {more} more than"):
        rank.executor.read(tuple(rank.groups))


def test_reading_within_an_iteration_is_refused():
    rank = rank_in_turn()
    rank.executor.begin_iteration()
    with pytest.raises(ScheduleError, match="within a training iteration"):
        rank.executor.read(())


def test_reading_behind_an_iteration_that_no_update_follows():
    """Megatron's rerun machinery ends a run so: behind the steps of an iteration, with a checkpoint."""
    rank = rank_in_turn()
    rank.iteration()
    assert rank.executor.progress() is not None
    rank.executor.read(())
    assert rank.executor.progress() is None, "who watches would take the checkpoint for a step that does not end"
    rank.iteration()


def test_all_of_them_are_brought_where_somebody_has_the_memory():
    rank = rank_in_turn()
    rank.executor.sync_parameters()
    rank.executor.unshard_all()
    assert {group.state for group in rank.groups.values()} == {GroupState.WHOLE}
