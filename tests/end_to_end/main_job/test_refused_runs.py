"""What a user got wrong is refused before the first step, in one line, with exit code 2."""

import json

import pytest
from plans import command_line, describe, made_up_table, make_schedule
from training import PP2_VP2_DP2, SMALL, launch_training

from megatron_ext.cost import cost_table as cost_file
from megatron_ext.formats.errors import InputError
from megatron_ext.schedule import validate

OPTIONS = [*SMALL, *PP2_VP2_DP2]

NOTICES = ("GPTModel IS DEPRECATED", "DistributedDataParallel: full_param_layout not provided")
"""How lines of Megatron begin that it prints as it builds any model, from 0.19 on."""


@pytest.fixture(scope="module")
def planned(megatron_tree, tmp_path_factory):
    """A workload, its schedule as JSON, and where they lie."""
    folder = tmp_path_factory.mktemp("planned")
    workload = describe(folder / "workload.json", OPTIONS)
    make_schedule(folder / "schedule.json", workload)
    return folder, json.loads((folder / "schedule.json").read_text())


def refused(result, *words):
    """The one line that says what is wrong holds ``words``; nothing was trained."""
    lines = [line for line in result.stderr.splitlines() if line.strip() and not line.startswith(NOTICES)]
    assert result.returncode == 2, result.stderr
    assert len(lines) == 1, "\n".join(lines)
    for word in words:
        assert str(word) in lines[0], lines[0]
    assert "iteration" not in result.stdout
    return lines[0]


def train(schedule_path, corpus_prefix, *more, options=OPTIONS, nproc=4):
    return launch_training(
        [*options, "--data-path", corpus_prefix, "--train-iters", "2", "--user-defined-schedule", schedule_path, *more],
        nproc=nproc,
    )


def test_schedule_for_another_model(planned, corpus_prefix):
    folder, _ = planned
    result = train(folder / "schedule.json", corpus_prefix, options=[*OPTIONS, "--num-layers", "8"])
    refused(result, "schedule.json", "the schedule is for 4 layers, the model has 8")


def test_schedule_for_other_parallel_sizes(planned, corpus_prefix):
    folder, _ = planned
    options = [*SMALL, "--pipeline-model-parallel-size", "2", "--data-parallel-size", "2"]
    refused(
        train(folder / "schedule.json", corpus_prefix, options=options),
        "schedule.json",
        "parallel.virtual_pipeline_model_parallel_size = 2",
        "1",
    )


def test_schedule_for_another_number_of_microbatches(planned, corpus_prefix):
    folder, _ = planned
    refused(
        train(folder / "schedule.json", corpus_prefix, "--global-batch-size", "16"),
        "parallel.num_microbatches = 4",
        "the run has 8",
    )


def test_schedule_of_dense_groups_for_a_model_with_experts(planned, corpus_prefix):
    """Refused by the first rank that has such a parameter, with its group; other sizes of experts by their field."""
    folder, _ = planned
    experts = "--num-experts 4 --disable-bias-linear --moe-ffn-hidden-size 32".split()
    line = refused(train(folder / "schedule.json", corpus_prefix, *experts), "schedule.json: groups", "the model has")
    assert "linear_" in line or ".experts." in line
    spread = refused(
        train(folder / "schedule.json", corpus_prefix, *experts, "--expert-model-parallel-size", "2"),
        "schedule.json: parallel.expert_model_parallel_size = 1: the run has 2",
    )
    assert spread != line


def test_fewer_processes_than_the_layout_needs(planned, corpus_prefix):
    folder, _ = planned
    refused(train(folder / "schedule.json", corpus_prefix, nproc=2), "WORLD_SIZE = 2", "need 4 processes")


def test_corpus_that_is_too_short(planned, corpus_prefix):
    folder, _ = planned
    options = [*OPTIONS, "--seq-length", "4194304"]
    result = launch_training([*options, "--data-path", corpus_prefix, "--train-iters", "2"])
    refused(result, "stdlib.idx", "too short")


def edit_unknown_field(schedule):
    schedule["groups"][0]["colour"] = 1
    return "groups[0]", "colour"


def edit_missing_parameter(schedule):
    name = schedule["groups"][0]["parameters"].pop()
    if not schedule["groups"][0]["parameters"]:
        schedule["groups"][0]["parameters"].append("nothing")
        return "groups[0].parameters", "nothing"
    return "groups", name


def edit_parameter_in_two_groups(schedule):
    first = schedule["groups"][0]
    schedule["groups"].append(dict(first))
    return f"groups[{len(schedule['groups']) - 1}].parameters", first["parameters"][0], "two groups"


def edit_need_by_before_unshard(schedule):
    # A group of the second chunk: nothing but its need_by is wrong at the second step.
    (index, *_) = [
        i for i, group in enumerate(schedule["groups"]) if (group["pp_rank"], group["model_chunk_id"]) == (0, 1)
    ]
    rank = schedule["ranks"][0]
    for entry in (rank.get("start", {}), *rank["steps"]):
        for action in entry.get("unshard", []):
            if action[0] == index:
                entry["unshard"] = [other for other in entry["unshard"] if other[0] != index]
                rank["steps"][1].setdefault("unshard", []).append([index, action[1], 0])
                return "ranks[0].steps[1].unshard", "need_by = 0", "before its unshard"
    raise AssertionError("group is never unsharded")


def edit_version(schedule):
    schedule["schema_version"] = 99
    return "schema_version = 99", "this release reads version 3"


def edit_order_of_steps(schedule):
    steps = schedule["ranks"][0]["steps"]
    steps[0]["step"], steps[1]["step"] = steps[1]["step"], steps[0]["step"]
    return "ranks[0].steps[0].step", "Megatron runs 0F0 here"


@pytest.fixture(scope="module")
def planned_for_two(megatron_tree, tmp_path_factory):
    """Options for one replica, so for two processes, and a schedule for them as JSON."""
    folder = tmp_path_factory.mktemp("planned_for_two")
    options = [*SMALL, *PP2_VP2_DP2[:-1], "1"]
    make_schedule(folder / "schedule.json", describe(folder / "workload.json", options))
    return options, json.loads((folder / "schedule.json").read_text())


def write_edited(schedule, edit, path) -> tuple[str, ...]:
    edited = json.loads(json.dumps(schedule))
    words = edit(edited)
    path.write_text(json.dumps(edited))
    return words


@pytest.mark.parametrize("edit", [edit_missing_parameter, edit_need_by_before_unshard])
def test_edited_schedule(edit, planned_for_two, corpus_prefix, tmp_path):
    """One that is not valid, and one that is valid, but for another model."""
    options, schedule = planned_for_two
    words = write_edited(schedule, edit, tmp_path / "edited.json")
    refused(train(tmp_path / "edited.json", corpus_prefix, options=options, nproc=2), "edited.json", *words)


@pytest.mark.parametrize("edit", [edit_unknown_field, edit_parameter_in_two_groups, edit_version, edit_order_of_steps])
def test_edited_schedule_is_refused_where_it_is_read(edit, planned_for_two, tmp_path):
    """The error that a run prints."""
    words = write_edited(planned_for_two[1], edit, tmp_path / "edited.json")
    with pytest.raises(InputError) as error:
        validate.load(tmp_path / "edited.json")
    assert "\n" not in str(error.value)
    for word in ("edited.json", *words):
        assert str(word) in str(error.value)


def test_cost_table_without_the_route_that_was_asked_for(planned, tmp_path):
    folder, _ = planned
    table = json.loads(json.dumps(_as_json(made_up_table())))
    del table["routes"]["cpu"]
    path = tmp_path / "table.json"
    path.write_text(json.dumps(table))
    files = "--cost-table", path, "--workload", folder / "workload.json", "--out", tmp_path / "s.json"
    refused(command_line("plan", *files, "--policy", "all-cpu"), "cpu")
    assert not (tmp_path / "s.json").exists()


def test_cost_table_of_an_unknown_version(planned, tmp_path):
    folder, _ = planned
    table = _as_json(made_up_table())
    table["schema_version"] = 7
    path = tmp_path / "table.json"
    path.write_text(json.dumps(table))
    files = "--cost-table", path, "--workload", folder / "workload.json", "--out", tmp_path / "s.json"
    refused(command_line("plan", *files), "table.json", "schema_version = 7")


def _as_json(table) -> dict:
    import msgspec

    return json.loads(msgspec.json.encode(cost_file.check(table)))


def test_a_trace_that_cannot_be_written_ends_every_rank_with_one_line(corpus_prefix, megatron_tree):
    options = [*SMALL, "--data-path", corpus_prefix, "--train-iters", "2", "--user-defined-schedule-trace"]
    refused(launch_training([*options, "/dev/null/trace.json"], nproc=2), "/dev/null", "cannot be written")
