"""What a run says of itself, and the equality check's files. Needs no process group."""

import sys
from types import SimpleNamespace

import msgspec
import pytest
import torch
from planning_cases import make_workload

from megatron_ext.formats.errors import InputError
from megatron_ext.megatron import hooks, one_line_end, run_summary
from megatron_ext.megatron.equality_check import EqualityCheck, parameter_digest
from megatron_ext.megatron.run_summary import Measured, Sample
from megatron_ext.planner.baselines import all_gpu
from megatron_ext.runtime.recorder import Recorder
from megatron_ext.schedule import match

MEASURED = Measured(10, 100e3, 20e3, 30e3)


def finish(check: EqualityCheck, norms=(1.0, 0.5), digests=("a", "b"), measured=MEASURED):
    step = iter([(True, norm, 0) for norm in norms])
    optimizer = type("Optimizer", (), {"step": lambda self: next(step)})()
    check.watch(optimizer)
    for _ in norms:
        optimizer.step()
    return check.finish(list(digests), measured)


def test_the_first_run_is_the_reference_and_an_equal_one_says_so(tmp_path):
    first = EqualityCheck(tmp_path / "r.json", "sha")
    assert first.is_reference and "reference" in finish(first)[0]
    second = EqualityCheck(tmp_path / "r.json", "sha")
    assert not second.is_reference and second.reference.measured == MEASURED
    assert "gradient norms of 2 iterations, parameters of 2 ranks" in finish(second)[0]


DIFFERENT = {
    "norm": ({"norms": (1.0, 0.5 + 2**-53)}, "NOT EQUAL: gradient norm of iteration 2"),
    "skipped step": ({"norms": (1.0, None)}, "NOT EQUAL: gradient norm of iteration 2"),
    "parameters": ({"digests": ("a", "c")}, "NOT EQUAL: parameters of rank 1"),
    "length": ({"norms": (1.0,)}, "cannot be compared: it trained 2 iterations, this run 1"),
    "ranks": ({"digests": ("a",)}, "cannot be compared: it had 2 ranks, this run 1"),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_one_bit_is_a_difference(name, tmp_path):
    finish(EqualityCheck(tmp_path / "r.json", "sha"))
    change, expected = DIFFERENT[name]
    with pytest.raises(InputError, match=expected):
        finish(EqualityCheck(tmp_path / "r.json", "sha"), **change)


def test_a_reference_of_another_schedule_is_refused_at_the_start(tmp_path):
    finish(EqualityCheck(tmp_path / "r.json", "sha"))
    with pytest.raises(InputError, match="another schedule"):
        EqualityCheck(tmp_path / "r.json", "other")
    with pytest.raises(InputError, match="--user-defined-schedule-check = .*: needs --user-defined-schedule"):
        hooks.configure(None, check=tmp_path / "r.json")


def test_the_digest_is_of_every_bit():
    model = torch.nn.Linear(3, 2).bfloat16()
    before = parameter_digest([model])
    assert parameter_digest([model]) == before
    with torch.no_grad():
        model.bias[0] += 1
    assert parameter_digest([model]) != before


def test_only_sampled_iterations_are_recorded_and_the_largest_rank_counts():
    recorder = Recorder(0, iterations=run_summary.SAMPLED)
    sample = Sample(recorder)
    wait = recorder.timed("wait", "wait 0", lambda: None)
    wait()  # before the first iteration
    for iteration in range(1, 15):
        recorder.begin_iteration()
        sample.begin_iteration(iteration)
        wait()
    assert {event.iteration for event in recorder.events()} == set(run_summary.SAMPLED)
    assert set(sample.of_rank()) == set(run_summary.SAMPLED)
    slow = dict.fromkeys(run_summary.SAMPLED, (9000.0, 7000.0, 8000.0))
    assert run_summary.combine([sample.of_rank(), slow]) == Measured(len(slow), 9e3, 7e3, 8e3)
    assert run_summary.combine([{}, slow]) is None


def test_the_end_says_what_was_gained_and_what_is_not_known():
    schedule = all_gpu(make_workload())
    alone = "\n".join(run_summary.end_lines(schedule, MEASURED, None, reference=False))
    assert "exposed 20.000 ms" in alone and "not known to this run" in alone and "gained" not in alone
    slower = Measured(10, 130e3, 45e3, 60e3)
    compared = "\n".join(run_summary.end_lines(schedule, MEASURED, slower, reference=False))
    assert "gained in an iteration: 25.000 ms of exposed time, 30.000 ms in all" in compared
    assert "nothing measured" in run_summary.end_lines(schedule, None, None, reference=False)[0]


def test_the_start_names_schedule_routes_prediction_and_trace():
    lines = "\n".join(run_summary.start_lines(all_gpu(make_workload()), "s.json", "t.json", reference=False))
    for part in ("gathers by s.json", "groups)", "all ranks of a pipeline: gpu", "predicted: ", "trace: t.json"):
        assert part in lines


def test_layers_are_compared_before_parameters():
    work = make_workload()
    schedule = all_gpu(work)
    named = msgspec.structs.replace(
        schedule,
        groups=tuple(
            msgspec.structs.replace(group, parameters=(f"decoder.layers.{number}.weight",))
            for number, group in enumerate(schedule.groups)
        ),
    )
    match.match_layers(named, len(schedule.groups))
    with pytest.raises(InputError, match="s.json: the schedule is for .* layers, the model has 3"):
        match.match_layers(named, 3, file="s.json")


class Left(BaseException):
    """The process would have ended."""


@pytest.fixture
def leaving(monkeypatch):
    codes = []

    def leave(code):
        codes.append(code)
        raise Left

    monkeypatch.setattr("os._exit", leave)
    monkeypatch.setattr(one_line_end, "OTHER_RANKS_SECONDS", 0.0)
    return codes


def test_bad_input_ends_with_one_line_and_other_errors_as_before(leaving, monkeypatch, capfd):
    seen = []
    monkeypatch.setattr("sys.excepthook", lambda *error: seen.append(error[0]))
    monkeypatch.setattr("sys.__stderr__", sys.stderr)
    one_line_end.install()
    with pytest.raises(Left):
        sys.excepthook(InputError, InputError("is wrong", file="s.json"), None)
    assert leaving == [2] and capfd.readouterr().err == "megatron-ext: s.json: is wrong\n"
    sys.excepthook(RuntimeError, RuntimeError("x"), None)
    assert seen == [RuntimeError]


def test_a_trace_that_nobody_wrote_is_an_error(leaving, monkeypatch, capfd):
    args = SimpleNamespace(user_defined_schedule_trace="t.json", user_defined_schedule_check=None)
    monkeypatch.setattr(hooks, "_megatron_args", lambda: args)
    with pytest.raises(Left):
        hooks._require_end()
    assert leaving == [1] and "t.json was not written: the process ended before" in capfd.readouterr().err
    monkeypatch.setattr(hooks, "_ended", True)
    hooks._require_end()
    monkeypatch.setattr(hooks, "_ended", False)
    args.user_defined_schedule_trace = None
    hooks._require_end()
    assert leaving == [1]
