"""Actions at layers must fit the layers that use their groups."""

import pytest
from msgspec.structs import replace
from planning_cases import make_workload

from megatron_ext.planner.assemble import Freed, Placed, assemble
from megatron_ext.schedule.group_facts import make_group, uses_of_groups
from megatron_ext.schedule.match import match
from megatron_ext.schedule.validate import InvalidSchedule, validate
from megatron_ext.workload.step_order import steps_of_ranks


def streamed(change=None, borrowed=False):
    """A group a layer, brought before and freed behind its layer in every step; ``change`` may
    change the actions of rank 0 (lists of Placed and Freed)."""
    work = make_workload(pp=2, vp=2, layers=3, zero_stage=3)
    if borrowed:  # the last layer computes with the first one's norm as well
        chunk = work.chunk(0, 0)
        first = replace(chunk.parameters[0], borrowed_by=(2,))
        work = replace(work, chunks=(replace(chunk, parameters=(first, *chunk.parameters[1:])), *work.chunks[1:]))
    groups, ids = [], {}
    for chunk in work.chunks:
        for layer in range(3):
            ids[chunk.pp_rank, chunk.model_chunk_id, layer] = len(groups)
            groups.append(
                make_group(work, chunk.pp_rank, chunk.model_chunk_id, [p for p in chunk.parameters if p.layer == layer])
            )
    placed, freed = [], []
    for rank in range(2):
        unshards, reshards = [], []
        for index, step in enumerate(steps_of_ranks(work.parallel)[rank]):
            for layer in (0, 1, 2) if step.kind == "F" else (2, 1, 0):
                group = ids[rank, step.stage // 2, layer]
                unshards.append(Placed(group, "gpu", index, index, at=layer))
                reshards.append(Freed(group, index, at=layer))
        placed.append(unshards)
        freed.append(reshards)
    if change is not None:
        placed[0], freed[0] = change(placed[0], freed[0])
    return assemble(work, groups, placed, freed, planner="test"), work


def first_backward(work) -> int:
    return next(index for index, step in enumerate(steps_of_ranks(work.parallel)[0]) if step.kind == "B")


def moved(items, number: int, at: int):
    return [item._replace(at=at) if n == number else item for n, item in enumerate(items)]


def test_layer_by_layer_fits():
    schedule, work = streamed()
    match(validate(schedule), work)
    assert uses_of_groups(schedule.groups, work)[:3] == [(0, 0), (1, 1), (2, 2)]


def test_a_group_that_is_freed_before_its_layer_is_refused():
    """In forward: layer 2's group behind layer 1; the schedule alone cannot tell."""
    schedule, work = streamed(lambda placed, freed: (moved(placed, 2, 1), moved(freed, 2, 1)))
    with pytest.raises(
        InvalidSchedule, match=r"reshard\[2\].at = 1: step 0F0: layer 2 still computes on group 2 after that"
    ):
        match(validate(schedule), work)


def test_a_group_that_comes_behind_its_layer_is_refused():
    schedule, work = streamed(lambda placed, freed: (moved(placed, 0, 1), moved(freed, 0, 1)))
    with pytest.raises(
        InvalidSchedule, match=r"unshard\[0\].at = 1: step 0F0: layer 0 computes on group 0 before that"
    ):
        match(validate(schedule), work)


def test_directions_turn_around_in_backward():
    schedule, work = streamed()
    number = 3 * first_backward(work)  # the top layer of that step

    def late(placed, freed):
        return moved(placed, number, 1), moved(freed, number, 1)

    schedule, work = streamed(late)
    with pytest.raises(InvalidSchedule, match=r"at = 1: step \dB0: layer 2 computes on group \d+ before that"):
        match(validate(schedule), work)


def test_a_layer_that_the_chunk_lacks_is_refused():
    schedule, work = streamed(lambda placed, freed: (placed, moved(freed, 2, 3)))
    with pytest.raises(InvalidSchedule, match=r"reshard\[2\].at = 3: step 0F0: the chunk has 3 layers"):
        match(validate(schedule), work)


def test_a_borrowed_parameter_must_stay_for_the_layer_that_borrows_it():
    schedule, work = streamed(borrowed=True)
    assert uses_of_groups(schedule.groups, work)[0] == (0, 2)
    with pytest.raises(InvalidSchedule, match="layer 2 still computes on group 0 after that"):
        match(validate(schedule), work)


def test_nothing_stands_at_a_layer_before_the_first_step():
    def at_start(placed, freed):
        return [placed[0]._replace(issue=-1, at=0), *placed[1:]], freed

    with pytest.raises(InvalidSchedule, match=r"start.unshard\[0\].at = 0: no layer computes before the first step"):
        validate(streamed(at_start)[0])


def test_a_group_of_another_chunk_is_not_needed_at_a_layer_of_this_one():
    schedule, work = streamed()
    other = next(
        index for index, group in enumerate(schedule.groups) if (group.pp_rank, group.model_chunk_id) == (0, 1)
    )

    def stray(placed, freed):
        return [*placed[:3], Placed(other, "gpu", 0, 0, at=2), *placed[3:]], [*freed, Freed(other, 0)]

    with pytest.raises(InvalidSchedule, match="of chunk 1 is needed when the step begins, not at a layer of chunk 0"):
        validate(streamed(stray)[0])


@pytest.mark.parametrize("change", ({"need_by": -2}, {"at": -2}))
def test_numbers_below_minus_one_mean_nothing_and_are_refused(change):
    """``need_by`` -2 for layer 0's group, at layer 2: the wait would stand before its unshard."""
    schedule, _ = streamed()
    rank = schedule.ranks[0]
    first = rank.steps[0]
    changed = replace(first, unshard=(replace(first.unshard[0], **change), *first.unshard[1:]))
    ranks = (replace(rank, steps=(changed, *rank.steps[1:])), *schedule.ranks[1:])
    name, value = next(iter(change.items()))
    with pytest.raises(InvalidSchedule, match=rf"unshard\[0\].{name} = {value}: expected a"):
        validate(replace(schedule, ranks=ranks))
    if name == "at":
        freed = replace(first, reshard=(replace(first.reshard[0], at=-2), *first.reshard[1:]))
        with pytest.raises(InvalidSchedule, match=r"reshard\[0\].at = -2: expected a layer"):
            validate(replace(schedule, ranks=(replace(rank, steps=(freed, *rank.steps[1:])), *schedule.ranks[1:])))
