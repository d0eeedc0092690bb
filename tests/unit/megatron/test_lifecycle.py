"""States of a run. Needs no process group."""

import sys
from types import SimpleNamespace

import pytest
import torch
from msgspec.structs import replace
from planning_cases import make_workload

from megatron_ext.formats import json_files, trace
from megatron_ext.formats.errors import InputError
from megatron_ext.megatron import agreement, building_run, hooks, lifecycle, one_line_end
from megatron_ext.megatron.lifecycle import Run, RunState
from megatron_ext.planner.baselines import all_gpu
from megatron_ext.runtime.group import ScheduleError
from megatron_ext.runtime.step_calls import IDLE
from megatron_ext.schedule import user_defined_schedule
from megatron_ext.schedule.user_defined_schedule import PublishGroup


@pytest.fixture
def schedule_path(tmp_path):
    path = tmp_path / "schedule.json"
    user_defined_schedule.save(path, all_gpu(make_workload()))
    return path


def test_a_run_without_a_schedule_leaves_megatron_alone_and_ends_once():
    run = Run(None, None)
    assert run.state is RunState.UNSCHEDULED
    assert run.begin_iteration(4, forward_only=False) is IDLE and run.peak_bytes() == 0
    run.finish()
    assert run.state is RunState.CLOSED
    with pytest.raises(AssertionError, match="closed cannot become closed"):
        run.finish()


def test_a_drive_that_is_not_given_is_refused_before_a_model_is_built(schedule_path):
    made = all_gpu(make_workload())
    made = replace(made, publish=(PublishGroup(group=0, to=("nvme",)),))
    user_defined_schedule.save(schedule_path, made)
    assert made.uses_drive and not replace(made, publish=()).uses_drive
    with pytest.raises(InputError, match="--user-defined-schedule-nvme-path = None: the schedule publishes to nvme;"):
        Run(schedule_path, None, made.parallel, nvme_path=None)


@pytest.mark.parametrize(
    "error, shown", [(ZeroDivisionError("by this rank alone"), True), (InputError("by all"), False)]
)
def test_an_error_is_shown_before_its_rank_ends_the_run_and_may_wait_for_others(
    schedule_path, monkeypatch, capfd, error, shown
):
    monkeypatch.setattr(hooks, "ended", False)
    run, ended = hooks.configure(schedule_path), []

    def finish(read_later):
        ended.append("ZeroDivisionError: by this rank alone" in capfd.readouterr().err)

    monkeypatch.setattr(run, "finish", finish)
    with pytest.raises(type(error)):
        try:
            raise error
        finally:
            hooks.finish()
    assert ended == [shown]


def test_a_run_that_was_kept_open_does_not_take_the_next_one_along(schedule_path, monkeypatch):
    monkeypatch.setattr(hooks, "ended", False)
    ended = []
    monkeypatch.setattr(hooks.atexit, "register", ended.append)
    first = hooks.configure(schedule_path)
    monkeypatch.setattr(first, "finish", lambda read_later: True)
    monkeypatch.setattr(first, "close", lambda: ended.append("first"))
    hooks.finish()
    second = hooks.configure(schedule_path)
    at_exit, said = ended
    assert said == "first" and not hooks.ended
    monkeypatch.setattr(second, "close", lambda: ended.append("second"))
    at_exit()  # in the middle of the second run
    assert len(ended) == 2


def test_training_without_a_schedule_after_a_run_that_has_ended_leaves_nothing_to_write(schedule_path, monkeypatch):
    monkeypatch.setattr(hooks, "ended", False)
    run = hooks.configure(schedule_path)
    monkeypatch.setattr(run, "finish", lambda read_later: False)
    hooks.finish()
    assert hooks.configure(None) is None and hooks.ended


@pytest.mark.parametrize(
    "text, said",
    [
        (
            "NCCL error: unhandled system error\nLast error:\nNo space left",
            "rank 1 cannot connect .*: NCCL error: .* left",
        ),
        ("CUDA error: an illegal memory access", "^CUDA error"),  # it and the loss of a rank have an end of their own
        ("Connection closed by peer", "^Connection closed"),
    ],
)
def test_a_rank_that_cannot_connect_ends_by_one_line(monkeypatch, text, said):
    monkeypatch.setattr(lifecycle.dist, "get_rank", lambda: 1)
    monkeypatch.setattr(one_line_end.worker, "on_failure", lambda: None)

    def connect():
        raise RuntimeError(text)

    with pytest.raises(RuntimeError if said[0] == "^" else InputError, match=said):
        lifecycle.connect_ranks([connect])


@pytest.mark.parametrize("chunks", [[torch.nn.Identity(), torch.nn.Linear(1, 1)], [torch.nn.Identity()]])
def test_a_rank_may_hold_nothing_in_its_first_chunk_or_in_any(chunks):
    assert building_run.device_of_chunks(chunks).kind == "cpu"


def test_an_iteration_ends_with_the_optimizer_however_often_its_steps_run(tmp_path, monkeypatch):
    """Megatron's rerun machinery runs them up to three times."""
    monkeypatch.setattr(lifecycle, "agree", lambda error, fact, file: None)
    monkeypatch.setattr(building_run.stock_trace, "record_steps", lambda recorder: None)
    optimizer = SimpleNamespace(step=lambda: (True, 1.0, 0))
    run = Run(None, tmp_path / "trace.json")
    run.on_train_setup(SimpleNamespace(), [], optimizer, None)
    for passes in (1, 3, 2):
        for _ in range(passes):
            run.begin_iteration(4, forward_only=False)
        run.begin_iteration(4, forward_only=True)  # an evaluation
        optimizer.step()
    assert run.own.recorder.iteration == 3


def test_a_trace_that_cannot_be_written_costs_one_line(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(lifecycle, "gather_objects", lambda value: [value])
    monkeypatch.setattr(lifecycle.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(building_run.stock_trace, "record_steps", lambda recorder: None)
    run = Run(None, tmp_path / "trace.json")
    (tmp_path / "trace.json").mkdir()  # while it trains
    run.finish()
    assert run.state is RunState.CLOSED
    (line,) = capfd.readouterr().err.splitlines()
    assert (
        line == f"megatron-ext: there is no trace of this run: {tmp_path}/trace.json: cannot be written: is a directory"
    )


@pytest.mark.parametrize("rank", [0, 1])
def test_only_the_first_rank_makes_objects_of_what_all_ranks_recorded(tmp_path, monkeypatch, rank):
    """For a thousand ranks that takes minutes and gigabytes, and a node has several ranks."""
    gathered = []
    monkeypatch.setattr(lifecycle, "gather_objects", lambda value: gathered.append(value) or [value, value])
    monkeypatch.setattr(lifecycle.dist, "get_rank", lambda: rank)
    monkeypatch.setattr(building_run.stock_trace, "record_steps", lambda recorder: None)
    run = Run(None, tmp_path / "trace.json")
    run.own.recorder.add("compute", "forward", 0, 1000)
    run.finish()
    assert [type(value) for value in gathered] == [bytes]
    assert (tmp_path / "trace.json").exists() == (rank == 0)
    if rank == 0:
        events, about = trace.load(tmp_path / "trace.json")
        assert [event.name for event in events] == ["forward"] * 2 and about["moved_bytes"] == [[], []]


@pytest.mark.parametrize("by, stock_gather", [("schedule", "0"), ("schedule", "1"), (None, "0")])
def test_a_trace_says_by_which_schedule_it_was_recorded(tmp_path, schedule_path, monkeypatch, by, stock_gather):
    """Megatron gathers in a reference."""
    monkeypatch.setenv(building_run.STOCK_GATHER, stock_gather)
    monkeypatch.setattr(lifecycle, "gather_objects", lambda value: [value])
    monkeypatch.setattr(lifecycle.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(building_run.stock_trace, "record_steps", lambda recorder: None)
    Run(by and schedule_path, tmp_path / "trace.json").finish()
    _, about = trace.load(tmp_path / "trace.json")
    scheduled = by is not None and stock_gather == "0"
    own = {"scheduled": scheduled, "schedule_sha256": json_files.sha256(schedule_path) if scheduled else None}
    assert about == own | {"on_device": False, "moved_bytes": [[]], "kind": "measured"}


def test_no_iteration_is_trained_before_the_setup(schedule_path):
    run = Run(schedule_path, None)
    assert run.state is RunState.BUILDING
    assert run.begin_iteration(4, forward_only=True) is IDLE
    with pytest.raises(ScheduleError, match="before .*on_train_setup was called"):
        run.begin_iteration(4, forward_only=False)


def test_frozen_parameters_are_refused_by_name(schedule_path, monkeypatch):
    """Nothing is laid out; what is wrong is told when all ranks agree, behind the chunk."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    ddp = torch.nn.Module()
    ddp.module, ddp.buffers, ddp.config = model, [], SimpleNamespace(num_layers=4)
    ddp.ddp_config = SimpleNamespace(use_distributed_optimizer=True, overlap_param_gather=True)
    monkeypatch.setattr(building_run.parallel_state, "get_pipeline_model_parallel_rank", lambda: 0)
    laid_out = []
    monkeypatch.setattr(
        building_run.buckets, "lay_out_buckets", lambda ddp, groups, **options: laid_out.append(ddp) or {}
    )
    monkeypatch.setattr(building_run, "replace_pre_hooks", lambda ddp, unshard_all: None)
    monkeypatch.setattr(building_run.match, "match_layers", lambda schedule, layers, file: None)
    monkeypatch.setattr(agreement, "gather_objects", lambda value: [value])
    run = Run(schedule_path, None)
    run.on_ddp_built(ddp)
    assert laid_out == [ddp]
    model[1].bias.requires_grad = False
    with pytest.raises(InputError, match="^1.bias: takes no gradient: frozen parameters cannot be scheduled$"):
        run.on_ddp_built(ddp)
    assert laid_out == [ddp]


def test_a_chunk_is_not_laid_out_where_another_node_is_short_of_host_memory(tmp_path, monkeypatch):
    """Where a model is built late, a chunk's groups are broadcast: the rank that refuses would be waited for."""
    ddp = torch.nn.Module()
    ddp.module, ddp.config, ddp.ddp_config = torch.nn.Linear(2, 2), SimpleNamespace(num_layers=4), None
    names, schedule = ("bias", "weight"), all_gpu(make_workload())
    group = replace(schedule.groups[0], pp_rank=0, model_chunk_id=0, parameters=names, gradients="host")
    ddp.buffers = [
        SimpleNamespace(params=[*ddp.module.parameters()], grad_dtype=torch.float32, data_parallel_world_size=2)
    ]
    monkeypatch.setattr(building_run.parallel_state, "get_pipeline_model_parallel_rank", lambda: 0)
    for refusal in ("refuse_ddp_config", "refuse_model"):
        monkeypatch.setattr(building_run.refusals, refusal, lambda config: None)
    monkeypatch.setattr(building_run.match, "match_layers", lambda schedule, layers, file: None)
    laid_out, told = [], []
    monkeypatch.setattr(
        building_run.buckets, "lay_out_buckets", lambda ddp, groups, **options: laid_out.append(ddp) or {}
    )
    user_defined_schedule.save(tmp_path / "schedule.json", schedule)

    def built(available: int, error: str | None) -> None:
        monkeypatch.setattr(building_run.free_host_memory, "available_bytes", lambda: available)
        monkeypatch.setattr(
            agreement, "gather_objects", lambda value: [told.append(value[0]) or value, (error, *value[1:])]
        )
        run = Run(tmp_path / "schedule.json", None)
        run.schedule = replace(schedule, groups=(group,))
        run.on_ddp_built(ddp)

    with pytest.raises(InputError, match="rank 1 is short"):
        built(1 << 20, "rank 1 is short")
    with pytest.raises(InputError, match="gradients that are added up there need .* bytes short"):
        built(0, None)
    assert laid_out == [] and told[0] is None and len(told) == 2


def test_a_model_that_never_fits_whole_converts_no_checkpoint(schedule_path, monkeypatch):
    """Megatron would write it before training begins, from parameters that have no bytes."""
    module = SimpleNamespace(_GLOBAL_ARGS=SimpleNamespace(ckpt_convert_format="torch"))
    monkeypatch.setitem(sys.modules, "megatron.training.global_vars", module)
    monkeypatch.setattr(building_run.parallel_state, "get_pipeline_model_parallel_rank", lambda: 0)
    monkeypatch.setattr(agreement, "gather_objects", lambda value: [value])
    for name in ("never_whole", "short_of_whole"):
        monkeypatch.setattr(building_run.memory_bill, name, lambda *given: 1)
    with pytest.raises(InputError, match=r"^--ckpt-convert-format = 'torch': parameters never fit whole"):
        assert Run(schedule_path, None).late is None


class Left(SimpleNamespace):
    """An executor that notes how it was left."""

    def __init__(self):
        super().__init__(parts=[], done=[], part=lambda kind: None, in_turn=None)
        for name in ("unshard_all", "let_go", "close"):
            setattr(self, name, lambda name=name: self.done.append(name))


@pytest.mark.parametrize(
    ("zero_stage", "options", "first"),
    [
        (3, {}, "let_go"),
        (3, {"save": "/checkpoints"}, "unshard_all"),
        (3, {"do_valid": True}, "unshard_all"),
        (3, {"do_test": True}, "unshard_all"),
        (3, None, "unshard_all"),
        (1, {}, "unshard_all"),
    ],
)
def test_parameters_are_brought_at_the_end_where_somebody_reads_them(
    schedule_path, monkeypatch, zero_stage, options, first
):
    """At zero stage 1 a stale parameter would look like a whole one, so there they are always brought."""
    monkeypatch.setattr(hooks, "ended", False)
    run = hooks.configure(schedule_path)
    run.schedule = replace(run.schedule, zero_stage=zero_stage)
    run.executor = executor = Left()
    arguments = None if options is None else SimpleNamespace(**dict(save=None, do_valid=False, do_test=False) | options)
    module = SimpleNamespace(_GLOBAL_ARGS=arguments)
    monkeypatch.setitem(sys.modules, "megatron.training.global_vars", module)
    hooks.on_train_end()
    assert executor.done == [first, "close"] and hooks.ended and run.state is RunState.CLOSED
