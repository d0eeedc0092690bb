"""A schedule whose actions no rank can run is refused before the first step, at the first such action."""

import copy

import msgspec
import pytest
from planning_cases import make_workload

from megatron_ext.planner.baselines import all_gpu
from megatron_ext.schedule.user_defined_schedule import Schedule
from megatron_ext.schedule.validate import InvalidSchedule, validate


@pytest.fixture(scope="module")
def by_drive() -> dict:
    """Two pipeline ranks with one group each; the first rank's goes through the only staging slot, in both steps."""
    work = make_workload(pp=2, vp=1, layers=1, order="1f1b", microbatches=1, zero_stage=3, nvme_slots=1)
    tree = msgspec.json.decode(msgspec.json.encode(all_gpu(work)))
    for step in tree["ranks"][0]["steps"]:
        step |= {"stage_in": [[0, 0]], "unshard": [[0, "nvme"]], "reshard": [[0]]}
    return tree | {"publish": [{"group": 0, "to": ["nvme"]}]}


def changed(tree: dict, changes: dict) -> Schedule:
    """``tree`` with the fields at these paths replaced, or doubled if the value is ``...``."""
    tree = copy.deepcopy(tree)
    for path, value in changes.items():
        *way, last = (int(name) if name.isdecimal() else name for name in path.split("."))
        held = tree
        for name in way:
            held = held[name]
        held[last] = held[last] * 2 if value is ... else value
    return msgspec.convert(tree, Schedule)


def test_a_group_may_go_through_a_slot_in_every_step(by_drive):
    validate(changed(by_drive, {}))


FIRST = "ranks.0.steps.0"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"ranks": []}, "ranks = 0: expected one entry for each of the 2 pipeline ranks"),
        ({"ranks.0.pp_rank": 1}, "ranks[0].pp_rank = 1: expected 0"),
        ({"groups.0.bytes": 0}, "groups[0].bytes = 0: must be positive"),
        ({"groups.0.parameters": []}, "groups[0].parameters: a group needs at least one parameter"),
        ({"groups.0.parameters": ...}, "groups[0].parameters = 'layers.0.norm': is in two groups, 0 and 0"),
        ({"groups.0.algorithm": "hierarchical"}, "groups[0].algorithm = 'hierarchical': needs data-parallel groups"),
        ({"groups.0.gradients": "host", "groups.0.states_rest": "device"}, "states_rest = 'device': is stepped on"),
        ({"groups.0.states_rest": "nvme"}, "groups[0].states_rest = 'nvme': needs state_slots to pass through"),
        ({"rollback_bytes": 0}, "rollback_bytes = 0: expected at least 1"),
        ({"publish.0.group": 2}, "publish[0].group = 2: there are 2 groups"),
        ({"publish": ...}, "publish[1].group = 0: is published twice"),
        ({"publish.0.to": ...}, "publish[0].to = ['nvme', 'nvme']: expected cpu, nvme or both"),
        ({"publish": []}, "steps[0].stage_in[0]: group 0 is staged in but never published to nvme"),
        ({f"{FIRST}.stage_in.0.0": -1}, "steps[0].stage_in[0] = -1: there are 2 groups"),
        ({f"{FIRST}.stage_in.0.1": 1}, "steps[0].stage_in[0].slot = 1: limits.nvme_slots is 1"),
        ({f"{FIRST}.stage_in": ...}, "steps[0].stage_in[1].slot = 0: slot 0 still holds group 0"),
        ({f"{FIRST}.stage_in": [[0, 0], [0, 1]], "limits.nvme_slots": 2}, "stage_in[1]: group 0 is staged already"),
        ({"limits.nvme_slot_bytes": 1}, "group 0 has 98560 bytes, more than limits.nvme_slot_bytes = 1"),
        ({f"{FIRST}.stage_in": []}, "unshard[0]: group 0 goes by nvme but was not staged in"),
        ({f"{FIRST}.unshard.0.0": 1}, "unshard[0] = 1: group 1 belongs to pipeline rank 1"),
        ({f"{FIRST}.unshard": ...}, "unshard[1]: group 0 is unsharded already"),
        ({f"{FIRST}.unshard": [[0, "nvme", -1, 0], [0, "nvme"]]}, "unshard: unshards must be listed in the order"),
        ({f"{FIRST}.unshard": []}, "steps[0]: step 0F0 computes on group 0, which is not whole then"),
        ({"ranks.0.start": {"unshard": [[0, "gpu"]]}}, "start.unshard[0].need_by = -1: an unshard at the start"),
        ({f"{FIRST}.unshard": [[0, "nvme", 2]]}, "unshard[0].need_by = 2: there are 2 steps"),
        ({"ranks.0.steps.1.unshard": [[0, "nvme", 0]]}, "need_by = 0: need_by lies before its unshard at step 1"),
        ({f"{FIRST}.unshard": [[0, "nvme", 1]], f"{FIRST}.reshard": [[0, 0]]}, "group 0 is freed before its need_by"),
        ({f"{FIRST}.reshard": ...}, "steps[0].reshard[1]: group 0 is not unsharded"),
        ({"zero_stage": 1}, "steps[0].reshard[0]: zero stage 1 never frees a group"),
        ({"limits.whole_parameter_bytes": 1}, "unshard[0]: unsharding group 0 makes 98560 bytes whole"),
        ({"zero_stage": 1, "limits.whole_parameter_bytes": 1}, "limits.whole_parameter_bytes = 1: needs 98560 bytes"),
    ],
)
def test_an_action_that_cannot_run_is_named(by_drive, changes, said):
    with pytest.raises(InvalidSchedule) as refused:
        validate(changed(by_drive, changes), file="s.json")
    assert str(refused.value).startswith("s.json: ") and said in str(refused.value)
