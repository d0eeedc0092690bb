"""States, versions and storage of groups."""

import pytest
import torch

from megatron_ext.runtime.group import Clock, FreedGroup, GroupState, RankGroup, ScheduleError, WholeBytes


class Done:
    def wait(self):
        """Arrived."""


def issue(group: RankGroup) -> Done:
    return Done()


def freed(numel: int = 256) -> FreedGroup:
    return FreedGroup(
        3, "chunk 1", torch.arange(numel, dtype=torch.float32), dp_rank=1, dp_size=2, residency=WholeBytes()
    )


def restore(group: RankGroup, clock: Clock, value: torch.Tensor) -> None:
    group.unshard(issue, clock)
    with torch.no_grad():
        group.whole.copy_(value)
    group.wait(clock)


def test_the_shard_outlives_the_whole_copy():
    group = freed()
    group.drop()
    assert group.whole.untyped_storage().nbytes() == 0
    assert torch.equal(group.shard, torch.arange(128, 256, dtype=torch.float32))


def test_views_saved_in_forward_are_whole_again_for_backward():
    """A parameter that was freed between forward and backward gives the gradients it would have given."""
    group, clock = freed(64), Clock()
    parameter = torch.nn.Parameter(torch.empty(8, 8))
    parameter.data = group.whole.view(8, 8)  # as Megatron lays a bucket out
    values, x = group.whole.clone(), torch.randn(4, 8, requires_grad=True)
    loss = (x @ parameter).square().sum()
    group.reshard()
    restore(group, clock, values)
    loss.backward()
    want = torch.autograd.grad((x @ values.view(8, 8)).square().sum(), x)[0]
    assert torch.equal(x.grad, want)
    assert parameter._version == 0


def test_the_peak_counts_what_is_whole_at_once():
    residency, clock = WholeBytes(), Clock()
    groups = [
        FreedGroup(n, "", torch.zeros(256 * (n + 1)), dp_rank=0, dp_size=2, residency=residency) for n in range(3)
    ]
    for group in groups:
        group.drop()
    residency.restart()
    for group in (groups[0], groups[1]):
        restore(group, clock, torch.zeros_like(group.whole))
    groups[0].reshard()
    restore(groups[2], clock, torch.zeros_like(groups[2].whole))
    assert residency.peak == 4 * (512 + 768) and residency.bytes == 4 * (512 + 768)


@pytest.mark.parametrize("make", [freed, lambda: RankGroup(3, "chunk 1", torch.zeros(256), 0, 2)])
def test_only_a_whole_and_fresh_group_may_be_used(make):
    group, clock = make(), Clock()
    group.drop()
    with pytest.raises(ScheduleError, match="computes on group 3 .chunk 1. while it is sharded"):
        group.check_usable(clock)
    restore(group, clock, torch.zeros(256))
    group.check_usable(clock)
    clock.version += 1
    with pytest.raises(ScheduleError, match="at version 1; parameters are at 2"):
        group.check_usable(clock)


def test_a_gather_that_brings_an_old_version_is_refused():
    group, clock = freed(), Clock()
    group.drop()
    group.unshard(issue, clock)
    clock.version = 2
    with pytest.raises(ScheduleError, match="was gathered at version 1, parameters are at 2"):
        group.wait(clock)


@pytest.mark.parametrize("make", [freed, lambda: RankGroup(3, "chunk 1", torch.zeros(256), 0, 2)])
def test_a_group_that_was_not_unsharded_cannot_be_waited_for(make):
    group = make()
    group.drop()
    with pytest.raises(ScheduleError, match="group 3 .chunk 1. is waited for but was not unsharded"):
        group.wait(Clock())


def test_a_group_in_flight_is_neither_freed_nor_unsharded_again():
    group = freed()
    group.drop()
    group.unshard(issue, Clock())
    with pytest.raises(ScheduleError, match="is freed while it is unsharding"):
        group.reshard()
    with pytest.raises(ScheduleError, match="is unsharded while unsharding"):
        group.unshard(issue, Clock())
    assert group.state is GroupState.UNSHARDING


def test_a_whole_copy_that_was_changed_becomes_the_shard():
    group = freed()
    with torch.no_grad():
        group.whole.fill_(7)
    group.adopt()
    group.drop()
    assert torch.equal(group.shard, torch.full((128,), 7.0))


def test_a_group_that_was_made_a_numpy_array_keeps_its_bytes():
    """As torch does where a hash on a machine without a GPU looks at a parameter: it cannot be resized."""
    group, clock = freed(), Clock()
    array = group.whole.numpy()
    with pytest.warns(UserWarning, match="a group keeps its 1024 bytes"):
        group.reshard()
    assert group.residency.bytes == 0 and array[255] == 255.0
    for turn in (1.0, 2.0):  # it comes and goes by its states, and nothing is read that was freed
        restore(group, clock, torch.full_like(group.whole, turn))
        assert array[0] == turn and group.residency.bytes == 1024
        group.reshard()
    restore(group, clock, torch.zeros_like(group.whole))
    group.drop()
    assert group.residency.bytes == 0 and group.state is GroupState.SHARDED
