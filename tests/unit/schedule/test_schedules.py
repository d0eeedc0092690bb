"""A directory of schedules: one for each number of micro-batches, over the same memory."""

import pytest
from msgspec.structs import replace
from planning_cases import make_table, make_workload

from megatron_ext import planner
from megatron_ext.formats.errors import InputError
from megatron_ext.schedule import schedules, user_defined_schedule
from megatron_ext.schedule.user_defined_schedule import Schedule


@pytest.fixture(scope="module")
def planned() -> list[Schedule]:
    work = replace(make_workload(microbatches=6), ramp=(2, 4))
    table = make_table(work)
    main = planner.plan(work, table)
    return [*planner.plan_ramp(main, work, table), main]


def test_what_is_saved_is_loaded_in_order(planned, tmp_path):
    schedules.save(tmp_path / "s", planned[::-1])
    assert list(schedules.load(tmp_path / "s")) == [2, 4, 6]
    assert (
        user_defined_schedule.read_unchecked(tmp_path / "s") == planned[-1]
    )  # for show, simulate and the number of ranks
    before = schedules.sha256(tmp_path / "s")
    schedules.save(tmp_path / "s", planned[1:])
    assert list(schedules.load(tmp_path / "s")) == [4, 6]
    assert schedules.sha256(tmp_path / "s") != before


def test_one_file_is_as_it_was(planned, tmp_path):
    user_defined_schedule.save(tmp_path / "s.json", planned[0])
    assert schedules.load(tmp_path / "s.json") == {2: planned[0]}
    assert schedules.sha256(tmp_path / "s.json") == user_defined_schedule.json_files.sha256(tmp_path / "s.json")


def test_a_directory_without_schedules_is_refused(tmp_path):
    with pytest.raises(InputError, match="holds no schedule"):
        schedules.load(tmp_path)


def test_a_number_that_is_there_twice_is_refused(planned, tmp_path):
    schedules.save(tmp_path, planned)
    user_defined_schedule.save(tmp_path / "7.json", planned[0])
    with pytest.raises(
        InputError, match="7.json: parallel.num_microbatches = 2: another file in .* is for the same number"
    ):
        schedules.load(tmp_path)


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("zero_stage", lambda one: replace(one, zero_stage=2)),
        ("limits", lambda one: replace(one, limits=replace(one.limits, host_bytes=1 << 40))),
        ("groups\\[0\\]", lambda one: replace(one, groups=(replace(one.groups[0], bytes=512), *one.groups[1:]))),
        ("parallel", lambda one: replace(one, parallel=replace(one.parallel, tensor_model_parallel_size=2))),
    ],
)
def test_memory_is_that_of_all_numbers(planned, tmp_path, field, change):
    schedules.save(tmp_path, planned)
    user_defined_schedule.save(tmp_path / "4.json", change(planned[1]))
    with pytest.raises(InputError, match=f"4.json: {field}.*: differs from 2.json"):
        schedules.load(tmp_path)


def test_out_that_is_a_file_is_refused(planned, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="--out = .*expected a directory: "):
        schedules.save(tmp_path / "file", planned)
